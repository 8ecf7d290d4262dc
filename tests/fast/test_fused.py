"""Attention and GELU of a deployed model: what takes their place, and what does not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import nmrun
from nmrun.fast import fused as kernels
from nmrun.fast import measurement
from nmrun.fast.cpu import probe
from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.fused import FusedAttention, FusedGELU
from nmrun.fast.sites import MaskedAttention
from nmrun.sparsity import nm_mask

pytestmark = pytest.mark.skipif(
    bool(kernels.KERNELS.obstacle()), reason="no compiler or no AVX-512"
)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes half of the time of the one before."""

    def side_by_side(*calls: Callable[[], object]) -> list[float]:
        for call in calls:
            call()
        return [0.5**i for i in range(len(calls))]

    monkeypatch.setattr(probe, "side_by_side", side_by_side)


class Block(nn.Module):
    def __init__(self, gelu: nn.Module) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)
        self.inner, self.gelu, self.outer = nn.Linear(32, 64), gelu, nn.Linear(64, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + self.outer(self.gelu(self.inner(x)))


def network(tanh: bool = True) -> nn.Module:
    torch.manual_seed(0)
    gelus = [nn.GELU(approximate="tanh" if tanh else "none") for _ in range(2)]
    model = nn.ModuleList([Block(gelu) for gelu in gelus])
    whole = nn.Sequential(*model).eval()
    for parameter in whole.parameters():
        if parameter.dim() == 2:
            parameter.data *= nm_mask(parameter.data, "1:4", 1, pad=True)
    return whole


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_take_the_place_of_torchs(dtype: torch.dtype, tanh: bool) -> None:
    model, x = network(tanh).to(dtype), torch.randn(3, 21, 32).to(dtype)
    exact = copy.deepcopy(model).double()(x.double()).detach()
    choices = {c.name: c for c in nmrun.deploy(model, x) if c.always_dense}
    assert {name: c.path for name, c in choices.items()} == dict.fromkeys(
        ("0.attend.attention", "1.attend.attention", "0.gelu", "1.gelu"), "fused"
    )
    reason = choices["0.attend.attention"].reason
    assert "3 x 4 x 21 x 8: torch 0.5 ms, fused 0.25 ms (2.00x)" in reason
    assert not any(c.is_sparse for c in choices.values())
    for block in model:
        assert isinstance(block.attend.attention, FusedAttention)
        assert isinstance(block.gelu, FusedGELU)
        assert block.gelu.tanh == tanh
    bound = 2e-6 if dtype == torch.float32 else 1e-2
    for one in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with torch.no_grad():
            assert float((one(x).double() - exact).norm() / exact.norm()) < bound


@pytest.mark.usefixtures("faster")
def test_a_gelu_that_is_called_by_keyword() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gelu = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.gelu(input=x)

    model, x = ByName(), torch.randn(3, 40)
    expected = model(x)
    assert [c.path for c in nmrun.deploy(model, x)] == ["fused"]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.usefixtures("faster")
def test_masks_few_queries_gradients_and_the_compiler() -> None:
    dense, x = network(), torch.randn(2, 21, 32)
    model = copy.deepcopy(dense)
    nmrun.deploy(model, x)
    mask = torch.ones(21, 21, dtype=torch.bool).triu(1)
    for tokens in (21, 1):
        part, seen = x[:, :tokens], mask[:tokens, :tokens]
        with torch.no_grad():
            torch.testing.assert_close(model[0](part, seen), dense[0](part, seen))
    grads = []
    for one in (model, dense):
        leaf = x.clone().requires_grad_()
        one(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    grads = []
    for one in (model, dense):
        bias = torch.zeros(21, 21, requires_grad=True)
        one.requires_grad_(False)[0](x, bias).square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), dense(x))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ((1, 2, 64, 16), (1, 2, 64, 16)),
        ((2, 1, 64, 16), (2, 1, 64, 16)),
        ((2, 64, 16), (2, 64, 16)),
        ((2, 2, 64, 16), (1, 2, 64, 8)),
    ],
)
def test_keys_and_values_are_broadcast_as_by_torch(
    key: tuple[int, ...], value: tuple[int, ...]
) -> None:
    """The kernel would read past their ends."""
    q, k, v = torch.randn(2, 2, 8, 16), torch.randn(key), torch.randn(value)
    exact = torch.softmax(q.double() @ k.double().mT / 4, -1) @ v.double()
    torch.testing.assert_close(FusedAttention()(q, k, v).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ((2, 2, 64, 8), (2, 2, 64, 16)),
        ((3, 2, 64, 16), (3, 2, 64, 16)),
        ((2, 4, 64, 16), (2, 4, 64, 16)),
    ],
)
def test_keys_and_values_that_do_not_fit_are_refused(
    key: tuple[int, ...], value: tuple[int, ...]
) -> None:
    with pytest.raises(RuntimeError, match="size"):
        FusedAttention()(torch.randn(2, 2, 8, 16), torch.randn(key), torch.randn(value))


@pytest.mark.usefixtures("faster")
def test_fewer_values_than_keys_are_refused() -> None:
    model, x = network(), torch.randn(2, 21, 32)
    nmrun.deploy(model, x)
    assert isinstance(model[0].attend.attention, FusedAttention)
    with pytest.raises(RuntimeError, match="keys of"):
        model[0].attend(x, x, x[:, :16], need_weights=False)


@pytest.mark.usefixtures("faster")
@pytest.mark.skipif(bool(bf16.KERNELS.obstacle()), reason="no AVX-512 with BF16")
@pytest.mark.parametrize(("tolerance", "path"), [(0.05, "fused bf16"), (1e-6, "fused")])
def test_with_int_8_attention_may_be_bfloat16(tolerance: float, path: str) -> None:
    model, x = network(), torch.randn(2, 21, 32)
    choices = {c.name: c for c in nmrun.deploy(model, x, precision="int8", tolerance=tolerance)}
    assert choices["0.attend.attention"].path == path
    assert model[0].attend.attention.low == (path == "fused bf16")


@pytest.mark.skipif(bool(bf16.KERNELS.obstacle()), reason="no AVX-512 with BF16")
def test_each_attention_is_judged_by_its_own_inputs(deploy_times: dict[str, float]) -> None:
    """The keys of the second have large numbers in common, beside which the rest is rounded away."""
    deploy_times.update({"packed": 0.5, "fused": 0.5, "fused bf16": 0.25})
    model, x = network(), torch.randn(2, 21, 32)
    with torch.no_grad():
        model[1].attend.in_proj_bias[32:64] = 200 * torch.randn(32).sign()
    choices = {c.name: c for c in nmrun.deploy(model, x, precision="int8")}
    near, far = (choices[f"{i}.attend.attention"] for i in (0, 1))
    assert (near.path, far.path) == ("fused bf16", "fused")
    assert "more than" not in near.reason
    assert "fused bf16: outputs" in far.reason
    assert "off, more than 0.05" in far.reason


def test_torchs_stay_where_they_are_faster_or_the_kernel_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(2, 21, 32)
    monkeypatch.setattr(probe, "side_by_side", lambda *calls: [1.0] * len(calls))
    model = network()
    choices = {c.name: c for c in nmrun.deploy(model, x)}
    assert choices["0.gelu"].path is None
    assert isinstance(model[0].gelu, nn.GELU)
    monkeypatch.setattr(kernels, "gelu", lambda x, tanh: x)
    monkeypatch.setattr(probe, "side_by_side", lambda *calls: [0.5**i for i in range(len(calls))])
    model = network()
    choices = {c.name: c for c in nmrun.deploy(model, x)}
    assert choices["0.gelu"].path is None
    assert choices["0.gelu"].reason == "fused: WRONG results"
    assert choices["0.attend.attention"].path == "fused"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = MaskedAttention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


@pytest.mark.skipif(bool(bf16.KERNELS.obstacle()), reason="no products of bfloat16")
def test_an_attention_may_round_its_probabilities() -> None:
    """One probability lies halfway between two numbers of bfloat16, and the first outputs are near 0:
    they are off by more than their own rounding."""
    q, k, v = (torch.zeros(1, 1, tokens, 16) for tokens in (16, 2, 2))
    q[..., :2], k[..., 1, :2] = 1, torch.tensor([-2.75, -0.006995])
    v[..., 0], v[..., 8:] = torch.tensor([1.0, -2.0]), 0.5
    low = tuple(t.bfloat16() for t in (q, k, v))
    (place,) = kernels.fusable(Attends(), low)
    exact, attend = place.exact(*low), partial(FusedAttention(), *low)
    assert measurement.fault(attend, exact) == "WRONG results"
    assert measurement.fault(attend, exact, place.roundings) == ""


@pytest.mark.usefixtures("faster")
def test_layers_with_hooks_or_a_forward_of_their_own_stay() -> None:
    model, x, calls = network(), torch.randn(2, 21, 32), []
    model[0].gelu.register_forward_hook(lambda *_: calls.append(1))
    model[1].gelu.forward = torch.relu
    nmrun.deploy(model, x)
    assert type(model[0].gelu) is type(model[1].gelu) is nn.GELU
    assert calls
