"""nmrun.deploy of models in bfloat16, whose products the processor has or a test emulates."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from bf16_emulated import HAS_INSTRUCTION, emulation
from deployed import share
from operands import normal, normal_bf16
from perceptrons import pruned
from torch import nn
from torch.nn import functional as F

import nmrun
from nmrun.fast.cpu import onednn
from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.cpu.packed_linear import Bf16Linear, BlockLinear


@pytest.fixture(autouse=True)
def faster(deploy_times: dict[str, float]) -> None:
    deploy_times.update({"packed": 0.5, "packed bf16": 0.25})


def mlp(pattern: str = "1:4") -> nn.Module:
    return pruned(pattern).bfloat16()


@pytest.mark.usefixtures("emulated_bf16")
@pytest.mark.parametrize("pattern", ["2:4", "1:8", "1:32", "3:7"])
def test_layers_take_the_fastest_right_products(pattern: str) -> None:
    model, x = mlp(pattern), normal_bf16(3, 5, 80)
    exact = copy.deepcopy(model).double()(x.double()).detach()
    choices = nmrun.deploy(model, x)
    assert [(c.path, c.is_sparse) for c in choices] == [("packed bf16", True)] * 2
    assert [type(model[i]) for i in (0, 2)] == [Bf16Linear] * 2
    with torch.no_grad():
        z = model(x)
        assert torch.equal(model(x[:1, :1]), z[:1, :1])
    assert z.dtype == torch.bfloat16
    assert float((z.double() - exact).norm() / exact.norm()) < 0.005
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x.float()), z)
    assert not list(model.parameters())


@pytest.mark.usefixtures("emulated_bf16")
def test_float32_is_left_to_float32_and_the_slower_is_not_taken(
    deploy_times: dict[str, float],
) -> None:
    assert [c.path for c in nmrun.deploy(mlp().float(), normal(3, 80))] == ["packed"] * 2
    for time, path in ((0.6, "packed"), (0.4, "packed bf16")):
        deploy_times["packed bf16"] = time
        assert [c.path for c in nmrun.deploy(mlp(), normal_bf16(3, 80))] == [path] * 2
    deploy_times.update({"packed bf16": 1.1, "packed": 1.2})
    assert [c.path for c in nmrun.deploy(mlp(), normal_bf16(3, 80))] == [None] * 2


def of_blocks(pattern: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    for layer in (model[0], model[2]):
        layer.weight.data = nmrun.sparsity.hard_threshold(layer.weight.data, pattern)
    return model.bfloat16().eval()


@pytest.mark.usefixtures("emulated_bf16")
def test_rows_that_share_their_columns_are_packed_in_blocks(deploy_times: dict[str, float]) -> None:
    deploy_times["packed blocks bf16"] = 0.2
    x = normal_bf16(3, 5, 80)
    for pattern, shape in (("32:4:16", (2, 2, 1, 16, 32)), ("16:4:8", (4, 1, 2, 16, 32))):
        model = of_blocks(pattern)
        exact = copy.deepcopy(model).double()(x.double()).detach()
        assert [c.path for c in nmrun.deploy(model, x)] == ["packed blocks bf16"] * 2
        assert isinstance(model[0], BlockLinear)
        assert model[0].values.shape == shape
        with torch.no_grad():
            assert share(model(x), exact) < 0.005
            assert torch.equal(model(x[1:, 2:4]), model(x)[1:, 2:4])  # a view
    choices = nmrun.deploy(mlp(), x)  # rows that share nothing are no candidates
    assert not any("blocks" in c.reason for c in choices)


def test_a_processor_without_the_instruction_says_so_in_one_line() -> None:
    """A model that was deployed where there is one, unpickled here."""
    x = normal_bf16(3, 80)
    with emulation():
        model = mlp()
        nmrun.deploy(model, x)
        expected, stored = model(x), pickle.dumps(model)
    model = pickle.loads(stored)
    if HAS_INSTRUCTION:
        assert torch.equal(model(x), expected)
        return
    with pytest.raises(
        RuntimeError, match=r"^products of bfloat16: this processor has no AVX-512 with BF16$"
    ):
        model(x)
    choices = nmrun.deploy(mlp(), x)
    assert [c.path for c in choices] == ["packed"] * 2
    assert torch.equal(model[0].dense(), mlp()[0].weight)  # what was packed can be had dense


needs_onednn = pytest.mark.skipif(
    torch.bfloat16 not in onednn.dtypes(), reason="torch has no oneDNN in bfloat16 here"
)


@pytest.fixture
def by_onednn(deploy_times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    deploy_times.update({"onednn": 0.2})
    monkeypatch.setattr("nmrun.fast.cpu.probe.SMALLEST", 1)


@needs_onednn
@pytest.mark.usefixtures("emulated_bf16", "by_onednn")
def test_what_is_dense_is_computed_by_onednn_where_it_is_the_fastest() -> None:
    model, x = mlp(), normal_bf16(3, 5, 80)
    model[2].weight.data = normal_bf16(30, 50)
    exact = copy.deepcopy(model).double()(x.double()).detach()
    keys = set(model.state_dict())
    choices = nmrun.deploy(model, x)
    assert [(c.path, c.is_sparse) for c in choices] == [("onednn", False)] * 2
    with torch.no_grad():
        z = model(x)
        assert model(x[:0]).shape == (0, 5, 30)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x.float()), z)
    assert z.dtype == torch.bfloat16
    assert float((z.double() - exact).norm() / exact.norm()) < 0.005
    assert set(model.state_dict()) == keys
    with pytest.raises(RuntimeError, match=r"^x has 79 features where the layer has 80$"):
        model(normal_bf16(3, 79))
    expected = z.float()
    torch.testing.assert_close(model.float()(x.float()), expected, rtol=0.05, atol=0.05)
    assert torch.equal(model.bfloat16()(x), z)
    assert model.to("meta")(x.to("meta")).shape == z.shape  # as on any device but the CPU


@needs_onednn
@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("compiled", [False, True])
def test_onednn_follows_a_weight_that_is_written_in_place(compiled: bool) -> None:
    model, x = mlp(), normal_bf16(3, 5, 80)
    nmrun.deploy(model, x)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        before = run(x)
        for write in (
            lambda: model[2].weight.mul_(2),
            lambda: setattr(model[0].weight, "data", normal_bf16(50, 80, seed=9)),
        ):
            write()
            hidden = F.linear(x, model[0].weight, model[0].bias)
            expected = F.linear(model[1](hidden), model[2].weight, model[2].bias).float()
            assert float((run(x) - expected).norm() / expected.norm()) < 0.01
            assert float((before - expected).norm() / expected.norm()) > 0.1


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_there_is_one_line() -> None:
    assert bf16.KERNELS.obstacle().startswith("no C compiler works here")
    with pytest.raises(RuntimeError, match=r"^products of bfloat16: no C compiler works here"):
        bf16.Bf16Matrix.packed(torch.ones(4, 4))
