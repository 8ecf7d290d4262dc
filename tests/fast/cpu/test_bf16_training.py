"""Training through N:M products in bfloat16, whose instruction a test emulates where the processor
has none.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import perceptrons
import pytest
import torch
from operands import normal, under_autocast
from perceptrons import batch, mlp
from torch import Tensor

from nmrun import accelerate, optim, sparsify
from nmrun.fast import measurement
from nmrun.fast.cpu import linear, probe
from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.cpu.linear import PRODUCTS, Bf16Forward, Bf16Products, BlockProducts, LinearProducts
from nmrun.fast.measurement import BF16, BF16_BLOCKS, BF16_FORWARD, Times, as_data, from_data
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold

pytestmark = pytest.mark.usefixtures("emulated_bf16", "small_layers")
train = functools.partial(perceptrons.train, low=True)
SLOW, FAST = Times(0.1, 2.0, 2.0, 2.0), Times(0.1, 1.0, 1.0, 1.0)


def near(result: Tensor, expected: Tensor, share: float) -> None:
    result, expected = result.detach().double(), expected.detach().double()
    assert float((result - expected).norm() / expected.norm()) < share


# --- the products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["2:4", "1:3", "3:8", "1:16", "5:32"])
@pytest.mark.parametrize("stored", ["rows", "columns"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [Bf16Products, Bf16Forward])
def test_products_and_gradients(
    pattern: str, stored: str, masked: bool, kind: type[Bf16Products]
) -> None:
    """Those of float64, of operands that are rounded."""
    p = Pattern.parse(pattern).over(41)
    w = hard_threshold(normal(22, 41), p, 1)
    w = w.t().contiguous().t() if stored == "columns" else w.contiguous()
    packed = kind((22, 41), torch.bfloat16, p, gradient_is_faster=True)
    packed.write(w, None, masked)
    x, dz, bias = normal(2, 9, 41, seed=1), normal(2, 9, 22, seed=2).bfloat16(), normal(22, seed=3)
    low, weight = x.bfloat16().requires_grad_(), w.clone().requires_grad_()
    added = bias.clone().requires_grad_()
    z = packed(low, weight, added)
    z.backward(dz)
    assert (z.dtype, low.grad.dtype, weight.grad.dtype) == (*[torch.bfloat16] * 2, torch.float32)
    exact = w.bfloat16().double()
    near(z, low.double() @ exact.t() + bias.double(), 0.003)
    near(low.grad, dz.double() @ exact, 0.003)
    near(added.grad, dz.double().sum((0, 1)), 0.01)
    whole = dz.double().flatten(0, 1).t() @ low.double().flatten(0, 1)
    near(weight.grad, whole * (w != 0) if masked else whole, 1e-6 if masked else 0.003)
    assert bool((weight.grad[w == 0] == 0).all()) is masked


@pytest.mark.parametrize(
    ("pattern", "outputs"), [("16:4:8", 32), ("64:4:16", 128), ("48:2:9", 96), ("32:4:32", 32)]
)
@pytest.mark.parametrize("stored", ["rows", "columns"])
def test_products_and_gradients_of_blocks(pattern: str, outputs: int, stored: str) -> None:
    p = Pattern.parse(pattern).over(41)
    w, other = (hard_threshold(normal(outputs, 41, seed=s), p, 1).contiguous() for s in (0, 5))
    w = w.t().contiguous().t() if stored == "columns" else w
    packed = BlockProducts((outputs, 41), torch.bfloat16, p, gradient_is_faster=True)
    x, dz, bias = (
        normal(2, 35, 41, seed=1),
        normal(2, 35, outputs, seed=2).bfloat16(),
        normal(outputs, seed=3),
    )
    for back in (None, other):
        packed.write(w, back)
        low, weight = x.bfloat16().requires_grad_(), w.clone().requires_grad_()
        z = packed(low, weight, bias)
        z.backward(dz)
        near(z, low.double() @ w.bfloat16().double().t() + bias.double(), 0.003)
        near(low.grad, dz.double() @ (w if back is None else back).bfloat16().double(), 0.003)
        whole = dz.double().flatten(0, 1).t() @ low.double().flatten(0, 1)
        near(weight.grad, whole, 0.003)
        packed.write(w, back, masked=True)
        weight.grad = None
        packed(x.bfloat16(), weight, bias).backward(dz)
        near(weight.grad * (w != 0), whole * (w != 0), 1e-6)
        assert bool(
            (
                weight.grad[(w == 0).unflatten(0, (-1, p.v)).all(1).repeat_interleave(p.v, 0)] == 0
            ).all()
        )


@pytest.mark.parametrize("kind", [Bf16Products, Bf16Forward])
def test_another_weight_for_the_input_gradient(kind: type[Bf16Products]) -> None:
    p = Pattern(2, 4)
    w, other = (hard_threshold(normal(24, 40, seed=s), p, 1).contiguous() for s in (0, 1))
    packed = kind((24, 40), torch.bfloat16, p)
    packed.write(w, other)
    x, dz = normal(5, 40).bfloat16().requires_grad_(), normal(5, 24).bfloat16()
    packed(x, w.clone().requires_grad_(), None).backward(dz)
    near(x.grad, dz.double() @ other.bfloat16().double(), 0.003)


@pytest.mark.parametrize("tiny", [0.0, 1e-42])
def test_a_kept_weight_that_is_zero_gets_its_gradient(tiny: float) -> None:
    """The packed matrix does not know it from a pruned one, nor one that is rounded to zero."""
    p = Pattern(2, 4)
    w, x, dz = hard_threshold(normal(8, 16), p, 1), normal(5, 16), normal(5, 8).bfloat16()
    w[0, w[0].nonzero()[:1]] = tiny
    packed = Bf16Products((8, 16), torch.bfloat16, p, gradient_is_faster=True)
    packed.write(w, None, masked=True)
    weight = w.clone().requires_grad_()
    packed(x, weight, None).backward(dz)
    near(weight.grad, dz.double().t() @ x.bfloat16().double(), 0.01)


@pytest.mark.slow
def test_operators_are_as_torch_wants_them() -> None:
    w = hard_threshold(normal(8, 16), Pattern(2, 4), 1)
    packed = Bf16Products((8, 16), torch.bfloat16, Pattern(2, 4))
    packed.write(w, None)
    parts = [packed.parts(kind) for kind in PRODUCTS]
    for part in parts:  # what lies behind the slots is nobody's
        part[0][int(part[3][-1]) :], part[1][int(part[3][-1]) :] = 0, 0
    x, dz = normal(5, 16).bfloat16().requires_grad_(), normal(5, 8).bfloat16()
    weight = w.clone().requires_grad_()
    torch.library.opcheck(linear.linear, (x, weight, None, *parts, "dense"))
    torch.library.opcheck(linear.multiply, (dz, parts[1], 16))
    torch.library.opcheck(linear.sampled, (dz, x.detach(), parts[0]))


def test_the_probe_finds_them_right() -> None:
    times = probe.measured(probe.LinearShape(64, 36, 70, torch.bfloat16, Pattern(2, 4)))
    assert set(times) == {"dense", "packed", BF16, BF16_FORWARD}
    for path in (BF16, BF16_FORWARD):
        assert not times[path].wrong
        assert min(times[path].pack, times[path].forward, times[path].weight_gradient) > 0
    blocks = probe.measured(probe.LinearShape(64, 64, 70, torch.bfloat16, Pattern.parse("32:4:16")))
    assert set(blocks) == {"dense", "packed", BF16, BF16_FORWARD, BF16_BLOCKS}
    assert not blocks[BF16_BLOCKS].wrong


def test_they_are_right_of_a_rounded_weight() -> None:
    """Of half a million results, some near zero are far from those of the weight as it was."""
    results = probe.measured(probe.LinearShape(512, 512, 1024, torch.bfloat16, Pattern(1, 16)))
    assert not any(results[path].wrong for path in ("packed", BF16, BF16_FORWARD))


# --- training ---------------------------------------------------------------------------------------


def run(recipe: str, path: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Model, optimizer and handle of a run whose layers take a path."""
    names = ("dense", "packed", BF16, BF16_FORWARD, BF16_BLOCKS)
    times = {name: FAST if name == path else SLOW for name in names}
    monkeypatch.setattr(probe, "measure", lambda shape: times)
    monkeypatch.setattr(measurement, "recall", lambda *_: None)
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    pattern = options.pop("pattern", "2:4")
    handle = sparsify(
        model, optimizer, recipe, pattern, total_steps=8, **{"exclude": None, **options}
    )
    choices = accelerate(handle, under_autocast(model, batch(0)[0]))
    assert {c.path for c in choices} == {None if path == "dense" else path}
    kinds = {"packed": LinearProducts, BF16: Bf16Products, BF16_FORWARD: Bf16Forward}
    kinds[BF16_BLOCKS] = BlockProducts
    if path != "dense":
        assert {type(w.layer.packed) for w in handle.sparse} == {kinds[path]}
    return model, optimizer, handle


RECIPES: dict[str, dict[str, Any]] = {
    "sr_ste": {}, "step": {"switch": 0.5}, "asp": {}, "ste_periodic": {"interval": 3},
    "ste": {"input_gradient": "double_prune", "exclude": ["4"]},
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("path", [BF16, BF16_FORWARD])
def test_a_run_goes_as_it_does_with_masks_alone(
    recipe: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, losses = (
        train(*run(recipe, name, monkeypatch, **RECIPES[recipe])[:2]) for name in ("dense", path)
    )
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("recipe", ["sr_ste", "step", "asp"])
def test_so_does_a_run_of_blocks(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**RECIPES[recipe], "pattern": "16:4:8", "pad": True, "exclude": ["4"]}
    expected, losses = (
        train(*run(recipe, name, monkeypatch, **options)[:2]) for name in ("dense", BF16_BLOCKS)
    )
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("path", [BF16, BF16_FORWARD])
def test_resumed_equals_uninterrupted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    perceptrons.resumes(lambda: run("step", path, monkeypatch, switch=0.5)[:2], low=True)


@pytest.mark.slow
def test_compiled_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = run("sr_ste", BF16, monkeypatch)
    other, again, _ = run("sr_ste", BF16, monkeypatch)
    whole = torch.compile(other, fullgraph=True, backend="aot_eager")
    expected = train(model, optimizer)
    assert train(whole, again) == pytest.approx(expected, rel=1e-2)


def test_force_and_packed_take_the_fastest_packed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"dense": FAST, "packed": Times(0.1, 3.0, 3.0, 3.0), BF16: SLOW}
    monkeypatch.setattr(probe, "measure", lambda shape: times)
    model = mlp()
    handle = sparsify(
        model, optim.AdamW(model.parameters()), "ste", "2:4", total_steps=8, exclude=None
    )
    sample = under_autocast(model, batch(0)[0])
    for mode, path in (("auto", None), ("force", BF16), ("packed", BF16)):
        assert [c.path for c in accelerate(handle, sample, mode)] == [path] * 3
    report = "\n".join(measurement.lines(accelerate(handle, sample, "force")))
    assert "packed bf16: 0.weight, 36 to 64, 70 tokens, bfloat16 2:4: dense 2.100 ms" in report


def test_a_run_that_goes_on_where_there_are_none_measures_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, handle = run("ste", BF16, monkeypatch)
    shape = probe.LinearShape(64, 36, 70, torch.bfloat16, Pattern(2, 4))
    known = from_data(as_data({str(shape): {"dense": SLOW, "packed": SLOW, BF16: FAST}}))
    monkeypatch.setattr(probe, "measure", lambda shape: {"dense": SLOW, "packed": FAST})
    sample = under_autocast(model, batch(0)[0])
    choices = accelerate(handle, sample, known=known)
    assert choices[0].path == BF16
    monkeypatch.setattr(bf16, "KERNELS", replace(bf16.KERNELS, sources=("nm_scratch",)))
    assert accelerate(handle, sample, known=known)[0].path == "packed"
