"""Sparse models, optimizer steps and whole training steps under torch.compile: as without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nmrun
from nmrun.sparsity import check_nm, hard_threshold
from nmrun.step.handle import Handle

pytestmark = pytest.mark.usefixtures("kernels_for_small_weights")
RECIPES: dict[str, dict[str, Any]] = {
    "ste": {},
    "sr_ste": {"decay": 0.1},
    "s_ste": {},
    "asp": {"prune_at": 0.5},
    "step": {"switch": 0.5},
    "bi_mask": {"interval": 2, "candidates": 3},
}
# factors that change, scores, adapters, other products
BEYOND_RULES = {"mdgf_linear": {}, "lbc": {}, "cast": {}, "sqft": {"rank": 2}, "slope": {}}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nmrun": lambda p: nmrun.optim.AdamW(p, lr=0.05),
    "nmrun in one pass": lambda p: nmrun.optim.AdamW(p, lr=0.05, fused=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}
BY_STEP = [(name, recipe) for name in OPTIMIZERS for recipe in ("sr_ste", "s_ste", "asp")]
BY_STEP += [("nmrun", "step"), ("nmrun in one pass", "step")]  # it needs nmrun's own
# whole training steps: every optimizer and every recipe once, the rest takes minutes
ONCE = [("nmrun", "step"), ("nmrun in one pass", "asp"), ("fused", "s_ste"), ("sgd", "sr_ste")]
TOTAL = 8


def start(recipe: str, name: str = "nmrun") -> tuple[nn.Sequential, torch.optim.Optimizer, Handle]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = OPTIMIZERS[name](model.parameters())
    options = {"exclude": None, **(RECIPES | BEYOND_RULES)[recipe]}
    return model, optimizer, nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, **options)


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(
    forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, step: Any, at: int
) -> None:
    forward(batch(at)).square().mean().backward()
    step()
    optimizer.zero_grad()


def same(
    actual: tuple[nn.Module, Any, Handle], expected: tuple[nn.Module, Any, Handle], exact: bool
) -> None:
    """Parameters, dense weights and phases."""
    assert actual[2].phase == expected[2].phase
    assert actual[2].recipe.step == expected[2].recipe.step
    tensors = [
        [p.detach() for p in model.parameters()] + [w.dense for w in handle.sparse]
        for model, _, handle in (actual, expected)
    ]
    # torch's own compiled AdamW is as far from its uncompiled one, in a dense training of this size
    close: dict[str, float] = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(*tensors, **close)
    if actual[2].is_sparse:
        check_nm(actual[0], "2:4", exclude=None)


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_serves_all_phases(recipe):
    """The same bits, compiled once: a change of phase changes values alone."""
    compiles: list[int] = []

    def backend(graph, inputs):
        compiles.append(1)
        return graph.forward

    training, expected = start(recipe), start(recipe)
    compiled = torch.compile(training[0], backend=backend, fullgraph=True)
    for at in range(TOTAL):
        train(compiled, training[1], training[1].step, at)
        train(expected[0], expected[1], expected[1].step, at)
        same(training, expected, exact=True)
    assert training[2].is_sparse
    with torch.no_grad():
        training[0][0].weight.neg_()
    training[0].load_state_dict(expected[0].state_dict())
    assert torch.equal(compiled(batch(0)), expected[0](batch(0)))
    assert len(compiles) == 1


@pytest.mark.parametrize("recipe", [*RECIPES, *BEYOND_RULES])
def test_compiled_backward_graph(recipe):
    training, expected = start(recipe), start(recipe)
    compiled = torch.compile(training[0], backend="aot_eager", fullgraph=True)
    for at in range(TOTAL):
        train(compiled, training[1], training[1].step, at)
        train(expected[0], expected[1], expected[1].step, at)
        same(training, expected, exact=False)
    assert training[2].is_sparse
    if recipe == "step":
        dense = training[2].sparse[0].dense
        assert torch.equal(training[0][0].weight, hard_threshold(dense, "2:4"))
    training[2].finalize()
    check_nm(training[0], "2:4", exclude=None)


# --- the optimizer's step, and the whole training step -------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "recipe"), BY_STEP)
def test_compiled_optimizer_step(optimizer, recipe):
    training, expected = start(recipe, optimizer), start(recipe, optimizer)
    step = torch.compile(training[1].step, backend="aot_eager")
    for at in range(TOTAL):
        train(training[0], training[1], step, at)
        train(expected[0], expected[1], expected[1].step, at)
        same(training, expected, exact=False)
    assert training[2].recipe.step == TOTAL
    training[2].finalize()
    check_nm(training[0], "2:4", exclude=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "recipe"),
    [case if case in ONCE else pytest.param(*case, marks=pytest.mark.minutes) for case in BY_STEP],
)
def test_compiled_training_step(optimizer, recipe):
    training, expected = start(recipe, optimizer), start(recipe, optimizer)

    @torch.compile(backend="aot_eager")
    def whole(x):
        loss = training[0](x).square().mean()
        loss.backward()
        training[1].step()
        training[1].zero_grad()
        return loss.detach()

    for at in range(TOTAL):
        loss = whole(batch(at))
        torch.testing.assert_close(loss, expected[0](batch(at)).square().mean().detach())
        train(expected[0], expected[1], expected[1].step, at)
        same(training, expected, exact=False)
    assert training[2].recipe.step == TOTAL
    training[2].finalize()
    check_nm(training[0], "2:4", exclude=None)


@pytest.mark.minutes
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_by_inductor(optimizer):
    """Code for this machine: model, step, and both at once."""
    expected = start("sr_ste", optimizer)
    for at in range(TOTAL):
        train(expected[0], expected[1], expected[1].step, at)
    for what in ("model", "step", "whole"):
        torch._dynamo.reset()
        training = start("sr_ste", optimizer)
        forward = torch.compile(training[0], fullgraph=True) if what == "model" else training[0]
        step = torch.compile(training[1].step) if what == "step" else training[1].step
        whole = torch.compile(train) if what == "whole" else train
        for at in range(TOTAL):
            whole(forward, training[1], step, at)
        same(training, expected, exact=False)
