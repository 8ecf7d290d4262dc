"""Products with packed activations: right in every layout, where they are taken, the runs of before up
to rounding, and the same bits again."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import config, rows, stopped
from torch import Tensor, nn
from torch.nn import functional
from training import Conv1D

import nmrun
from nmrun.fast import measurement
from nmrun.fast.acceleration import accelerate
from nmrun.fast.cpu import activations, probe
from nmrun.fast.cpu.activations import NAME, ActivationShape, pack_activations
from nmrun.fast.cpu.kernels import products
from nmrun.fast.measurement import Choice, Times
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import build, runner
from nmrun.patterns import Pattern
from nmrun.step.activations import SquaredReLU

pytestmark = [
    pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler works here"),
    pytest.mark.usefixtures("small_layers"),
]
FAST, SLOW = Times(0.0, 1.0, 1.0), Times(0.0, 2.0, 2.0)


def measured(monkeypatch: pytest.MonkeyPatch, own: Times, dense: Times = SLOW) -> None:
    """Times that a probe finds, of the packed products and of all others."""
    monkeypatch.setattr(
        activations,
        "measure",
        lambda shape: {path: own if path == NAME else dense for path in shape.paths},
    )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the products with packed activations, as they are computed."""
    seen: list[str] = []
    for name in ("reads", "feeds"):
        own = getattr(activations, name)

        def counted(*operands: Any, name: str = name, own: Any = own) -> Tensor:
            seen.append(name)
            return own(*operands)

        monkeypatch.setattr(activations, name, counted)
    return seen


class FeedForward(nn.Sequential):
    """16 to 64 to 24, with a dropout between as vision transformers have it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(16, 64), SquaredReLU(), nn.Dropout(0.25), nn.Linear(64, 24))


def packing(model: nn.Module, pattern: str = "2:4", mode: str = "force", **shares: Any) -> Any:
    activations = nmrun.sparse_activations(model, pattern, **shares)
    x = torch.randn(2, 7, 16)
    return activations, pack_activations(model, activations, lambda: model.eval()(x), [], (), mode)


# --- the products ---------------------------------------------------------------------------------


def mostly_zero(*shape: int) -> Tensor:
    x = torch.randn(*shape)
    return x * (torch.rand(*shape) < 0.3)


@pytest.mark.parametrize("tokens", [1, 37, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stored", ["outputs by inputs", "inputs by outputs"])
def test_products_and_gradients(tokens: int, bias: bool, stored: str) -> None:
    """Against float64; where z is 0 its gradient is not asked for."""
    torch.manual_seed(0)
    b = torch.randn(24) if bias else None
    weight = torch.randn(24, 130) if stored == "outputs by inputs" else torch.randn(130, 24).t()
    z, dy = mostly_zero(tokens, 130), torch.randn(24, tokens).t()
    results, expected = [], []
    for of, dtype, into in (
        (activations.reads, torch.float32, results),
        (functional.linear, torch.float64, expected),
    ):
        leaves = [None if t is None else t.detach().to(dtype) for t in (z, weight, b)]
        inputs = [t.requires_grad_() for t in leaves if t is not None]
        y = of(*leaves)  # type: ignore[operator]
        into += [y, *torch.autograd.grad(y, inputs, dy.to(dtype))]
    expected[1] = expected[1] * (z != 0)
    for ours, right in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)
    dx, dv = activations.feeds_back(z, dy, weight.t())
    right = [z.double() @ weight.double().t(), z.double().t() @ dy.double()]
    for ours, exact in zip((dx, dv), right, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_operators_as_torch_wants_them() -> None:
    z, x = mostly_zero(9, 40), torch.randn(9, 16)
    w, v, bias = torch.randn(8, 40), torch.randn(40, 16), torch.randn(40)
    library = torch.ops.nmrun
    for operator, operands in (
        (library.reads_cpu, (z, w.requires_grad_(), torch.randn(8))),
        (library.reads_back_cpu, (z, w.detach(), torch.randn(9, 8))),
        (library.feeds_cpu, (x.requires_grad_(), v, bias, False)),
        (library.feeds_back_cpu, (z, x.detach(), v)),
    ):
        torch.library.opcheck(operator.default, operands)


@pytest.mark.parametrize("role", ["reads", "feeds"])
def test_the_probe_finds_them_right(role: str) -> None:
    rows, columns = (24, 64) if role == "reads" else (64, 24)
    shape = ActivationShape(rows, columns, 70, role, Pattern(2, 8, v=16))
    times = probe.measured(shape, by=activations.measure)
    assert set(times) == set(shape.paths)
    assert not times[NAME].wrong
    assert times[NAME].forward > 0
    assert times[NAME].input_gradient > 0


@pytest.mark.parametrize("product", ["reads", "reads_back", "feeds_back"])
def test_a_product_that_is_not_right_is_never_taken(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(activations, product)

    def wrong(*operands: Any) -> Any:
        result = own(*operands)
        return result * 1.05 if isinstance(result, Tensor) else (result[0] * 1.05, result[1])

    monkeypatch.setattr(activations, product, wrong)
    _, choices = packing(FeedForward())
    paths = {choice.name: choice.path for choice in choices}
    broken = "0.weight" if product == "feeds_back" else "3.weight"
    assert paths.pop(broken) is None
    assert [*paths.values()] == [NAME]
    (reason,) = [choice.reason for choice in choices if choice.name == broken]
    assert "WRONG results" in reason


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "taken"), [(FAST, True), (Times(0.0, 1.98, 1.98), False)])
def test_only_where_clearly_faster(
    own: Times, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, own)
    for mode, expected in (("auto", taken), ("force", True), ("off", None), ("packed", None)):
        _, choices = packing(FeedForward(), mode=mode)
        names = [] if expected is None else ["0.weight", "3.weight"]
        assert [choice.name for choice in choices] == names
        assert [choice.path for choice in choices] == [NAME if expected else None] * len(names)


def test_times_of_a_processor_with_other_products_are_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = FeedForward(), torch.randn(2, 7, 16)
    sparse = nmrun.sparse_activations(model, "2:4")
    pack = functools.partial(pack_activations, model, sparse, lambda: model.eval()(x), [])
    measured(monkeypatch, own=SLOW, dense=FAST)
    monkeypatch.setattr(activations.onednn, "available", lambda: True)
    known = {str(c.shape): dict.fromkeys(c.shape.paths, SLOW) | {NAME: FAST} for c in pack()}
    assert [c.path for c in pack(known=known)] == [NAME] * 2
    monkeypatch.setattr(activations.onednn, "available", lambda: False)
    assert [c.path for c in pack(known=known)] == [None] * 2


def test_against_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that has packed weights keeps them where they are as fast; packing counts for each of
    two micro-batches."""
    measured(monkeypatch, FAST)
    x = torch.randn(5, 16)
    for pack, taken in ((0.1, False), (2.5, True)):
        times = {"dense": Times(0.0, 1.4, 1.4, 1.4), "packed": Times(pack, 0.25, 0.25, 1.6)}
        before = Choice("3.weight", "packed", "", None, times)
        model = FeedForward()
        activations = nmrun.sparse_activations(model, "2:4")
        _, choice = pack_activations(
            model, activations, lambda m=model: m.eval()(x), [before], accumulate=2
        )
        assert choice.path == (NAME if taken else None)


@pytest.mark.parametrize("dense_end", [0.0, 0.5])
def test_weights_are_packed_where_a_pass_needs_them(dense_end: float) -> None:
    """Beside packed activations in the dense steps alone, where these are the run's."""

    def trained(mode: str) -> tuple[list[bool], list[Tensor]]:
        model, x = FeedForward(), torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
        optimizer = nmrun.optim.Adam(model.parameters(), lr=0.1, eps=1e-2)
        handle = nmrun.sparsify(model, optimizer, "ste", "2:4", exclude=None)
        activations = nmrun.sparse_activations(model, "2:4", total_steps=4, dense_end=dense_end)
        choices = accelerate(handle, lambda: model.eval()(x), "packed" if mode == "force" else mode)
        pack_activations(model, activations, lambda: model.eval()(x), choices, handle.sparse, mode)
        for step in range(4):
            activations.at(step)
            torch.manual_seed(step)
            model.train()(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        packed = [w.layer is not None and w.layer.packed is not None for w in handle.sparse]
        return packed, [p.detach().clone() for p in model.parameters()]

    (packed, weights), (_, expected) = trained("force"), trained("off")
    assert packed == [dense_end > 0] * 2
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_a_packed_weight_costs_beside_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs with dense steps, whose weights are packed after all steps."""
    measured(monkeypatch, Times(0.0, 1.0, 1.0))
    times = {"dense": Times(0.0, 1.4, 1.4, 1.4), "packed": Times(1.0, 0.25, 0.25, 1.6)}
    before = Choice("3.weight", "packed", "", None, times)
    x = torch.randn(5, 16)
    for dense_end, taken in ((0.0, NAME), (0.5, None)):
        model = FeedForward()
        activations = nmrun.sparse_activations(model, "2:4", total_steps=4, dense_end=dense_end)
        *_, choice = pack_activations(model, activations, lambda m=model: m.eval()(x), [before])
        assert choice.path == taken


def test_left_alone_is_what_is_not_next_to_activations(passes: list[str]) -> None:
    """A norm between, estimates of gradients, a forward of its own, frozen weights, other dtypes."""
    normed = FeedForward()
    normed[2] = nn.LayerNorm(64)
    assert [choice.name for choice in packing(normed)[1]] == ["0.weight"]
    frozen, own, double = FeedForward(), FeedForward(), FeedForward().double()
    frozen[3].weight.requires_grad_(False)
    assert [choice.name for choice in packing(frozen)[1]] == ["0.weight"]
    own[0].forward = lambda x: functional.linear(x, own[0].weight)
    assert [choice.name for choice in packing(own)[1]] == ["3.weight"]
    activations, x = nmrun.sparse_activations(double, "2:4"), torch.randn(5, 16).double()
    assert pack_activations(double, activations, lambda: double(x), []) == []
    model = FeedForward()
    optimizer = nmrun.optim.AdamW(model.parameters())
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", mvue="2:4", exclude=["0"])
    activations = nmrun.sparse_activations(model, "2:4")
    choices = pack_activations(
        model, activations, lambda: model(x.float()), [], handle.sparse, "force"
    )
    assert [choice.name for choice in choices] == ["0.weight"]
    passes.clear()
    model(x.float())
    assert passes == ["feeds"]


def test_layers_that_are_called_by_keyword(passes: list[str]) -> None:
    class ByName(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            feeds, squared, _, reads = self
            return reads(x=squared(feeds(input=x)))

    model = ByName()
    model[3] = Conv1D(24, 64)
    assert [choice.name for choice in packing(model)[1]] == ["0.weight", "3.weight"]
    model.train()(torch.randn(5, 16))
    assert passes[-2:] == ["feeds", "reads"]


@pytest.mark.parametrize("width", [8, 4096])
def test_an_input_of_another_width_is_refused_as_by_torch(width: int) -> None:
    model = FeedForward()
    packing(model)
    x, plain = torch.randn(5, width), FeedForward()
    for layer in (0, 3):
        with pytest.raises(RuntimeError) as expected:
            plain[layer](x)
        with pytest.raises(RuntimeError) as error:
            model.train()[layer](x)
        assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("recipe", ["dense", "sr_ste", "t_sr_ste", "asp"])
@pytest.mark.parametrize("pattern", ["2:4", "1:8", "8:2:8"])
def test_training_is_that_of_dense_products(recipe: str, pattern: str, passes: list[str]) -> None:
    """Dense steps at both ends have their bits; all others differ by rounding."""
    losses, x = [], torch.randn(70, 16, generator=torch.Generator().manual_seed(3))
    for mode in ("off", "force"):
        model = FeedForward()
        model[2] = nn.Identity()
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=1e-2)
        handle = nmrun.sparsify(model, optimizer, recipe, "2:4", 10, exclude=None)
        activations = nmrun.sparse_activations(
            model, pattern, total_steps=10, dense_start=0.2, dense_end=0.2
        )
        sample = functools.partial(model, x)
        pack_activations(model, activations, sample, [], handle.sparse, mode)
        losses.append([])
        passes.clear()
        for step in range(10):
            activations.at(step)
            loss = functional.mse_loss(model.train()(x), x[:, :1].expand(70, 24))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        activations.at(5)
        model.eval()(x)  # evaluation is torch's
        assert passes == ["feeds", "reads"] * (6 if mode == "force" else 0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][:2] == losses[0][:2]


def test_a_copy_computes_with_its_own_weights() -> None:
    model, x = FeedForward(), torch.randn(5, 16)
    packing(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[3].weight.zero_()
        twin[0].weight.add_(1)
    assert torch.equal(twin.train()(x), twin[3].bias.expand(5, 24))
    twin(x).sum().backward()
    assert model[3].weight.grad is None


@pytest.mark.minutes
def test_compiled_as_a_whole_it_computes_the_same(passes: list[str]) -> None:
    model, x = FeedForward(), torch.randn(6, 16)
    model[2] = nn.Identity()
    activations, _ = packing(model, total_steps=10, dense_end=0.5)
    compiled = torch.compile(model.train(), fullgraph=True)
    for step in (0, 9, 0):
        activations.at(step)
        expected, result = model(x), compiled(x)
        torch.testing.assert_close(result, expected)
        parameters = list(model.parameters())
        grads = (torch.autograd.grad(y.sum(), parameters) for y in (result, expected))
        torch.testing.assert_close(*grads)


# --- in a run -------------------------------------------------------------------------------------

GPT = (
    *("dataset=stdlib_text", "dataset.context=16", "model=gpt_tiny", "model.width=16"),
    *("model.heads=2", "model.activation=relu2", "optimizer=adamw", "trainer.limit_evaluation=8"),
    *("trainer.activations=2:4", "trainer.activations_dense_end=0.25"),
)


def run(folder: Path, *words: str) -> Path:
    cfg = config(folder, *GPT, *words)
    result = runner.run(cfg, run_folder(cfg))
    assert result["status"] == "finished", result
    return Path(result["folder"])


@pytest.mark.parametrize("words", [("recipe=dense",), ("recipe=s_ste", "trainer.accumulate=2")])
def test_a_run_has_the_losses_of_dense_products_and_its_own_bits_again(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[str]
) -> None:
    """Interrupted and gone on with, even where a new trial would choose otherwise."""
    measured(monkeypatch, FAST)
    monkeypatch.setattr(build, "LARGE", 1)
    dense = run(tmp_path / "dense", *words, "trainer.acceleration=packed")
    assert passes == []
    whole = run(tmp_path / "whole", *words)
    assert set(passes) == {"feeds", "reads"}
    cut = config(tmp_path / "cut", *GPT, *words)
    stopped(cut, 5)
    monkeypatch.setattr("nmrun.fast.measurement.cache_folder", lambda: tmp_path / "other")
    measured(monkeypatch, SLOW, FAST)
    passes.clear()
    resumed = Path(runner.run(cut, run_folder(cut))["folder"])
    assert set(passes) == {"feeds", "reads"}
    for name in ("model.safetensors", "best.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert rows(resumed) == rows(whole)
    ours, theirs = ([r["train/loss"] for r in rows(f) if "train/loss" in r] for f in (whole, dense))
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert len(ours) == 6


def test_the_plan_says_it_and_small_networks_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, FAST)
    cfg = config(tmp_path, *GPT, "recipe=dense")
    assert build.build(cfg).accelerated == []
    monkeypatch.setattr(build, "LARGE", 1)
    lines = measurement.lines(build.build(cfg).accelerated)
    assert any("products with packed activations in the steps that prune" in line for line in lines)
    (line,) = [
        line for line in lines if "packed activations: h.0.mlp.c_fc.weight and 1 more" in line
    ]
    assert "reads" not in line
    assert "feeds 2:4 activations" in line
    assert not any("N:M products in" in line for line in lines)
