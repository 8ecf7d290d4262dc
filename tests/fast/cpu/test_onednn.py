"""Dense layers by oneDNN: right products, where they are taken, and that they are taken back."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import perceptrons
import pytest
import torch
import torch.nn.functional as F
from perceptrons import batch, mlp
from runs import config
from torch import Tensor, nn
from training import Conv1D

from nmrun import accelerate, optim, sparsify
from nmrun.fast import measurement
from nmrun.fast.cpu import onednn, probe
from nmrun.fast.cpu.kernels import products
from nmrun.fast.measurement import Times, as_data, from_data
from nmrun.lab.train import build

pytestmark = [
    pytest.mark.skipif(not onednn.available(), reason="torch has no oneDNN here"),
    pytest.mark.usefixtures("small_layers"),
]
needs_compiler = pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here")
train = functools.partial(perceptrons.train, parts=1)
start = functools.partial(perceptrons.start, exclude=["4"])  # the head stays dense
FAST, SLOW = Times(0.0, 1.0, 1.0, 1.0), Times(0.0, 2.0, 2.0, 2.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the results of oneDNN's products."""
    seen: list[tuple[int, ...]] = []

    def counted(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((len(a), len(b)))
        return product(a, b, bias)

    product = onednn.product
    monkeypatch.setattr(onednn, "product", counted)
    return seen


def measured(monkeypatch: pytest.MonkeyPatch, **times: Times) -> None:
    """Times that a probe finds, of those paths that a shape has."""
    monkeypatch.setattr(
        probe, "measure", lambda shape: {k: v for k, v in times.items() if k in shape.paths}
    )


# --- the products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("a", ["rows", "columns", "slice", "expanded"])
@pytest.mark.parametrize("b", ["rows", "columns", "slice"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_however_matrices_lie(a: str, b: str, bias: bool) -> None:
    def laid(how: str, rows: int) -> Tensor:
        wide = torch.randn(rows, 3 * 24, dtype=torch.float32)
        ways = {
            "rows": wide[:, :24].clone(),
            "columns": wide[:, :24].t().contiguous().t(),
            "slice": wide[:, 24:48],
            "expanded": wide[0, 0].expand(rows, 24),
        }
        return ways[how]

    torch.manual_seed(0)
    x, y, z = laid(a, 37), laid(b, 19), torch.randn(19) if bias else None
    expected = x.double() @ y.double().t() + (0 if z is None else z.double())
    torch.testing.assert_close(onednn.product(x, y, z).double(), expected, rtol=1e-5, atol=1e-5)
    if bias:
        torch.library.opcheck(torch.ops.nmrun.product_onednn.default, (x, y, z))


def test_gradients_and_their_gradients() -> None:
    torch.manual_seed(0)
    x, weight, bias, dz = (
        torch.randn(*size, dtype=torch.float64)
        for size in ((2, 5, 24), (16, 24), (16,), (2, 5, 16))
    )
    gradients = []
    for of, dtype in ((onednn.linear, torch.float32), (F.linear, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        z: Any = of(*leaves)  # type: ignore[operator]
        first = torch.autograd.grad(z, leaves, dz.to(dtype), create_graph=True)
        penalty = sum(part.square().sum() for part in first)
        gradients.append([*first, *torch.autograd.grad(penalty, leaves, allow_unused=True)])
    for ours, right in zip(*gradients, strict=True):
        assert (ours is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_the_probe_finds_them_right() -> None:
    for pattern in (None, probe.Pattern(2, 4)):
        shape = probe.LinearShape(64, 36, 70, torch.float32, pattern)
        times = probe.measured(shape)
        assert set(times) == set(shape.paths) >= {"dense", "onednn"}
        assert not times["onednn"].wrong
        assert times["onednn"].dense > 0
    assert probe.LinearShape(64, 36, 70, torch.bfloat16, None).paths == ("dense",)


# --- where they are taken -------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("recipe", ["dense", "ste"])
def test_layers_that_are_dense_train_by_onednn(
    recipe: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=SLOW)
    plain = train(*start(recipe)[:2])
    model, optimizer, handle = start(recipe)
    choices = accelerate(handle, lambda: model(batch(0)[0]))
    assert [c.path for c in choices] == ["onednn"] * 3
    assert [c.always_dense for c in choices] == ([True] * 3 if recipe == "dense" else [0, 0, 1])
    lines = measurement.lines(choices)
    assert "oneDNN's dense products where they are faster than torch's default" in lines
    about = "  onednn: 4.weight, 48 to 10, 70 tokens, float32: "
    assert f"{about}dense 6.000 ms, onednn 3.000 ms (2.00x)" in lines
    calls.clear()
    assert train(model, optimizer, range(1)) == pytest.approx(plain[:1], rel=1e-4)
    # three products a layer, but for the gradient of the network's input
    assert sorted(calls) == sorted(
        [(70, 64), (70, 48), (70, 10), (64, 36), (48, 64), (10, 48), (70, 48), (70, 64)]
    )
    handle.finalize() if recipe == "dense" else None
    model.eval()
    calls.clear()
    model(batch(0)[0])
    assert not calls


@needs_compiler
@pytest.mark.parametrize("recipe", ["dense", "ste"])
def test_layers_that_are_called_by_keyword(
    recipe: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(36, 64), Conv1D(10, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x=self.first(input=x).relu())

    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=Times(0.0, 0.5, 0.5, 0.5))
    model, x = ByName(), batch(0)[0]
    handle = sparsify(model, optim.AdamW(model.parameters()), recipe, "2:4", exclude=["last"])
    choices = accelerate(handle, lambda: model(x))
    assert [c.path for c in choices] == ["onednn" if recipe == "dense" else "packed", "onednn"]
    expected = copy.deepcopy(model)(x)
    assert (70, 10) in calls
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_training_is_the_same_to_rounding_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=SLOW)
    expected = train(*start("sr_ste")[:2])
    for compiled in (False, True):
        model, optimizer, handle = start("sr_ste")
        accelerate(handle, lambda model=model: model(batch(0)[0]))
        whole = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        assert train(whole, optimizer) == pytest.approx(expected, rel=1e-3)


def test_gradients_of_single_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.func, which has no rules for these products."""
    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=SLOW)
    model, _, handle = start("dense")
    accelerate(handle, lambda: model(batch(0)[0]))
    x, target = (t[:3] for t in batch(0))

    def loss(values: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), target)

    parameters = dict(model.named_parameters())
    gradients = torch.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, target)
    plain = mlp()
    for i in range(3):
        plain.zero_grad()
        F.cross_entropy(plain(x[i]), target[i]).backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad)


@needs_compiler
def test_dense_phases_of_packed_layers(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=Times(0.0, 0.5, 0.5, 9.0))
    model, optimizer, handle = start("step", switch=0.5, exclude=["0", "4"])
    choices = {c.name: c.path for c in accelerate(handle, lambda: model(batch(0)[0]))}
    assert choices == {"0.weight": "onednn", "2.weight": "packed", "4.weight": "onednn"}
    calls.clear()
    train(model, optimizer, range(1))
    assert handle.phase == "dense"
    assert (70, 48) in calls
    train(model, optimizer, range(6))
    assert handle.phase == "sparse"
    calls.clear()
    train(model, optimizer, range(1))
    assert (48, 64) in calls  # the weight gradient, which stays dense
    # of the head's input gradient; not the packed forward product
    assert calls.count((70, 48)) == 1


def test_finalize_and_off_take_them_back(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=SLOW)
    model, optimizer, handle = start("ste")
    accelerate(handle, lambda: model(batch(0)[0]))
    assert "forward" in vars(model[4])
    twin = copy.deepcopy(model)
    assert accelerate(handle, lambda: model(batch(0)[0]), "off") == []
    calls.clear()
    expected = model(batch(1)[0])
    assert not calls
    assert torch.allclose(twin(batch(1)[0]), expected, atol=1e-5)
    accelerate(handle, lambda: model(batch(0)[0]))
    train(model, optimizer)
    assert set(model.state_dict()) == set(mlp().state_dict())
    handle.finalize()
    assert all("forward" not in vars(module) for module in model.modules())


@needs_compiler
@pytest.mark.parametrize(
    ("own", "taken"),
    [(FAST, True), (Times(0.0, 1.98, 1.98, 1.98), False), (Times(wrong="WRONG results"), False)],
)
def test_only_where_right_and_clearly_faster(
    own: Times, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, dense=SLOW, onednn=own, packed=SLOW)
    model, _, handle = start("ste")
    choices = accelerate(handle, lambda: model(batch(0)[0]))
    assert [c.path for c in choices] == ["onednn" if taken else None] * 3
    monkeypatch.setattr(probe, "SMALLEST", 1 << 24)
    choices = accelerate(handle, lambda: model(batch(0)[0]))
    assert [c.path for c in choices] == [None] * 2  # the head is not even looked at
    known = from_data(as_data({"48 to 10, 70 tokens, float32": {"dense": SLOW, "onednn": FAST}}))
    monkeypatch.setattr(probe, "SMALLEST", 1)
    again = accelerate(handle, lambda: model(batch(0)[0]), known=known)
    assert again[-1].path == "onednn"  # as the run that goes on had it


def test_layers_in_bfloat16_and_the_sums_of_double_pruning_stay_torchs(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=SLOW)
    model, optimizer, handle = start("sr_ste", input_gradient="double_prune")
    plain = train(*start("sr_ste", input_gradient="double_prune")[:2])
    accelerate(handle, lambda: model(batch(0)[0]))
    assert train(model, optimizer) == pytest.approx(plain, rel=1e-3)
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model(batch(0)[0]).sum().backward()
    assert not calls


# --- in a run -------------------------------------------------------------------------------------


def test_a_dense_run_says_it_and_a_small_network_keeps_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, dense=SLOW, onednn=FAST, packed=SLOW)
    words = ["recipe=dense", "model=mlp"]
    parts = build.build(config(tmp_path, *words))
    assert parts.accelerated == []
    monkeypatch.setattr(build, "LARGE", 1)
    parts = build.build(config(tmp_path, *words))
    assert {c.path for c in parts.accelerated} == {"onednn"}
    lines = measurement.lines(parts.accelerated)
    assert any("onednn: " in line for line in lines), lines
    assert build.build(config(tmp_path, *words, "trainer.acceleration=off")).accelerated == []
