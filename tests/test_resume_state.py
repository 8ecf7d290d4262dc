"""What is saved with model and optimizer is all of a training: in any order, in plain data."""

from __future__ import annotations

import pydoc
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from training import (
    KINDS,
    SPARSE,
    TOTAL,
    Start,
    attach,
    batch,
    bits,
    by_sgd,
    everything,
    net,
    start,
    stored,
    train,
)

import nmrun
from nmrun.errors import ConfigError

# with parameters of their own: scores, adapters, scales
SCORED = ("lbc", "maskllm", "sqft", "cast")
HALF = [("sr_ste", 1), ("asp", 2), ("asp", 7), ("step", 3), ("step", 7), ("s_ste", 4)]


def resumed(recipe: str, states: list[Any], order: str, **options: Any) -> Start:
    """A model that was initialized otherwise, with state dicts in an order such as "mos".

    m loads the model, o the optimizer; s is sparsify.
    """
    model = net(5)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.3, fused=options.pop("fused", False))
    handle = None
    for letter in order:
        if letter == "s":
            handle = attach(model, optimizer, recipe, **options)
        elif letter == "m":
            model.load_state_dict(states[0])
        else:
            optimizer.load_state_dict(states[1])
    return model, optimizer, handle


def ways() -> Iterator[Any]:
    """All triples of a recipe, a step and an order; by default each recipe and each order meet each
    step.
    """
    for i, recipe in enumerate(SPARSE):
        orders = ("smo", "som", "mso", "mos", "oms", "osm")
        for j, stop in enumerate((1, 4, 7)):
            for k, order in enumerate(orders):
                marks = () if k == (i + 2 * j) % len(orders) else pytest.mark.minutes
                yield pytest.param(recipe, stop, order, marks=marks)


@pytest.mark.usefixtures("kernels_for_small_weights")
@pytest.mark.parametrize(("recipe", "stop", "order"), list(ways()))
def test_model_and_optimizer_resume_with_the_same_bits(recipe, stop, order):
    """Through a file without pickle, with what is measured on the way; stopped at step 4 with a rule
    and Adam in one pass."""
    fused = stop == 4
    whole, first = start(recipe, fused=fused), start(recipe, fused=fused)
    train(*whole[:2], range(TOTAL), whole[2])
    train(*first[:2], range(stop), first[2])
    second = resumed(recipe, stored(*first), order, fused=fused)
    assert everything(*second) == everything(*first)
    assert second[2].phase == first[2].phase
    train(*second[:2], range(stop, TOTAL), second[2])
    assert everything(*second) == everything(*whole)
    assert second[2].metrics() == whole[2].metrics()
    assert not [event for event in second[2].pop_events() if event.kind == "outside"]
    second[2].finalize()
    assert torch.equal(second[0][0].weight, whole[0][0].weight)


class Loads(nmrun.optim.AdamW):
    """An optimizer that loads without torch's hooks, as some packages' do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        for group, saved in zip(self.param_groups, groups, strict=True):
            saved["params"] = group["params"]
        parameters = [p for group in groups for p in group["params"]]
        state = {parameters[number]: value for number, value in state_dict["state"].items()}
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})


@pytest.mark.parametrize("then", ["step", "save", "look"])
@pytest.mark.parametrize(("recipe", "stop"), [*HALF, ("bi_mask", 4)])
def test_what_is_loaded_past_the_hooks_is_noticed(recipe, stop, then):
    whole, first = start(recipe), start(recipe)
    train(*whole[:2], range(TOTAL))
    train(*first[:2], range(stop))
    states = stored(*first[:2])
    model = net(5)
    optimizer = Loads(model.parameters(), lr=0.3)
    handle = attach(model, optimizer, recipe)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    if then == "save":
        assert bits(optimizer.state_dict()) == bits(first[1].state_dict())
    elif then == "look":
        with handle.dense_weights():
            for weight, other in zip(handle.sparse, first[2].sparse, strict=True):
                assert torch.equal(weight.parameter, other.dense)
    assert handle.recipe.step == stop
    train(model, optimizer, range(stop, TOTAL))
    assert everything(model, optimizer, handle) == everything(*whole)
    handle.finalize()
    assert "load_state_dict" not in vars(optimizer)


def test_another_recipe_s_state_is_refused_past_the_hooks_too():
    first = start("sr_ste")
    train(*first[:2], range(2))
    model = net()
    optimizer = Loads(model.parameters())
    attach(model, optimizer, "s_ste")
    before = bits(optimizer.state_dict())
    with pytest.raises(ConfigError, match="recipe is sr_ste there and s_ste here") as e:
        optimizer.load_state_dict(stored(*first[:2])[1])
    assert bits(optimizer.state_dict()) == before
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_before_the_first_step(kind):
    """Some of them look for a count of steps in every state that is not empty."""
    results: list[Any] = []
    states: list[Any] = []
    for loads in (False, True):
        model = net(3 if loads else 0)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.02)
        attach(model, optimizer, "sr_ste")
        if loads:
            for part, state in zip((model, optimizer), states, strict=True):
                part.load_state_dict(state)
        states = states or stored(model, optimizer)
        train(model, optimizer, range(3))
        results.append(everything(model, optimizer))
    assert results[0] == results[1]


class Unused(nn.Module):
    """No gradient reaches its second layer in the first three steps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(16, 8), nn.Linear(16, 8)

    def steps(self, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            x = batch(number)
            out = self.first(x) if number < 3 else self.first(x) + self.second(x)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((f"torch.optim.{kind}", {}) for kind in KINDS),
        ("torch.optim.Adam", {"amsgrad": True}),
        ("torch.optim.AdamW", {"amsgrad": True}),
        ("nmrun.optim.AdamW", {"amsgrad": True}),
        ("nmrun.optim.AdamW", {}),
    ],
)
@pytest.mark.parametrize("stop", [0, 2])
def test_a_state_of_weights_that_were_never_stepped_is_loaded_before_sparsify(stop, kind, options):
    def make(seed: int) -> tuple[Unused, torch.optim.Optimizer]:
        model = Unused(seed)
        return model, pydoc.locate(kind)(model.parameters(), lr=0.02, **options)

    model, optimizer = make(0)
    nmrun.sparsify(model, optimizer, "sr_ste", "2:4", exclude=None)
    model.steps(optimizer, range(stop))
    states = stored(model, optimizer)
    saved = [s for s in states[1]["state"].values() if "nmrun_dense" in s]
    unstepped = saved[1:] if stop else saved
    assert len(unstepped) == (1 if stop else 2)
    for state in unstepped:  # no moments of zeros
        assert all(key == "nmrun_dense" or value.dim() == 0 for key, value in state.items())
        if kind.endswith((".Adam", ".AdamW")):
            assert set(state) == {"nmrun_dense", "step"}
    model.steps(optimizer, range(stop, 5))
    other, second = make(1)
    for part, state in zip((other, second), states, strict=True):
        part.load_state_dict(state)
    nmrun.sparsify(other, second, "sr_ste", "2:4", exclude=None)
    other.steps(second, range(stop, 5))
    assert everything(other, second) == everything(model, optimizer)


@pytest.mark.parametrize(("recipe", "at"), [(name, (2, 8)[i % 2]) for i, name in enumerate(SPARSE)])
def test_a_handle_that_was_further_goes_back(recipe, at):
    """Loading an early state into a handle in a later phase, and the other way round."""
    early = start(recipe)
    train(*early[:2], range(at))
    states, expected = stored(*early[:2]), everything(*early)
    other = start(recipe, seed=5)
    train(*other[:2], range(TOTAL - at))
    other[0].load_state_dict(states[0])
    other[1].load_state_dict(states[1])
    assert everything(*other) == expected
    train(*early[:2], range(at, TOTAL))
    train(*other[:2], range(at, TOTAL))
    assert everything(*other) == everything(*early)


@pytest.mark.parametrize("recipe", SPARSE)
def test_a_state_that_is_loaded_while_dense_weights_are_shown_is_the_state(recipe):
    """Inside ``dense_weights``, where checkpoints may be written too."""
    early, other = start(recipe), start(recipe, seed=5)
    train(*early[:2], range(3))
    states, expected = stored(*early[:2]), everything(*early)
    train(*other[:2], range(8))
    with other[2].dense_weights():
        other[0].load_state_dict(states[0])
        other[1].load_state_dict(states[1])
    assert everything(*other) == expected


@pytest.mark.parametrize("order", ["smo", "som", "oms"])
def test_a_model_that_was_saved_as_it_is_evaluated_keeps_its_frozen_weights(order):
    model, optimizer, handle = start("maskllm", dense=0.0)
    train(model, optimizer, range(4))
    dense = [weight.dense.clone() for weight in handle.sparse]
    with handle.evaluation_weights():
        states = stored(model, optimizer)
    other = resumed("maskllm", states, order, dense=0.0)
    train(*other[:2], range(4, 6))
    with other[2].evaluation_weights():
        train(*other[:2], range(6, TOTAL))
    assert all(torch.equal(w.dense, d) for w, d in zip(other[2].sparse, dense, strict=True))
    other[2].finalize()


@pytest.mark.parametrize("order", ["smo", "som"])
@pytest.mark.parametrize("recipe", ["proxsparse", "maskllm", "cast"])
def test_a_model_that_was_saved_as_it_is_evaluated_resumes_where_it_comes_first(recipe, order):
    """After the optimizer the first forward pass is with other weights, which is said."""
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(7))
    with handle.evaluation_weights():
        other = resumed(recipe, stored(model, optimizer), order)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*other[:2], range(7, 9))
    train(model, optimizer, range(7, 9))
    first = order == "smo"
    assert sum("load the model before the optimizer" in str(w.message) for w in caught) == (
        not first
    )
    assert (everything(*other) == everything(model, optimizer, handle)) == first


@pytest.mark.parametrize("recipe", SCORED)
def test_a_state_that_is_saved_after_a_failed_step_has_the_groups_of_the_optimizer(
    recipe, monkeypatch
):
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(6))
    with monkeypatch.context() as patch:
        patch.setattr("nmrun.optim.adam.stock_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, range(6, 7))
    optimizer.zero_grad()
    handle.refresh()
    other = resumed(recipe, stored(model, optimizer, handle), "mos")
    train(*other[:2], range(6, TOTAL))
    train(model, optimizer, range(6, TOTAL))
    assert everything(*other) == everything(model, optimizer, handle)


def test_the_clock_lies_in_the_first_parameter_group_as_plain_data():
    model, optimizer, _ = start("step")
    train(model, optimizer, range(3))
    saved = stored(optimizer)[0]["param_groups"][0]["nmrun"]
    assert (saved["recipe"], saved["pattern"], saved["state"]["step"]) == ("step", "2:4", 3)
    assert saved["weights"] == {"0.weight": "2:4", "2.weight": "2:4"}


def test_a_state_from_a_training_without_nmrun_begins_at_once():
    """Its moments are taken over; the recipe begins at its first step."""
    plain = net()
    before = nmrun.optim.AdamW(plain.parameters(), lr=0.02)
    train(plain, before, range(3))
    model, optimizer, handle = start("sr_ste", seed=5)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(before.state_dict())
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"],
                       before.state[plain[0].weight]["exp_avg"])  # fmt: skip
    train(model, optimizer, range(3, 5))
    assert handle.recipe.step == 2
    nmrun.sparsity.check_nm(model[0].weight, "2:4")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another recipe": ({"recipe": "ste"}, "another training .recipe is sr_ste there and ste here"),
    "one with scores": ({"recipe": "maskllm"}, "recipe is sr_ste there and maskllm here"),
    "another ratio": ({"pattern": "1:4"}, "pattern is 2:4 there and 1:4 here"),
    "other weights": ({"exclude": "2"}, r"2\.weight is 2:4 there and None here"),
    "a ratio of one": ({"overrides": {"0": "1:4"}}, r"0\.weight is 2:4 there and 1:4 here"),
}


@pytest.mark.parametrize("sparsify_first", [False, True])
@pytest.mark.parametrize("mistake", OTHERS)
def test_the_state_of_another_training_is_refused_in_one_line(mistake, sparsify_first):
    options, message = OTHERS[mistake]
    first = start("sr_ste")
    train(*first[:2], range(3))
    states = stored(*first[:2])
    model = net(5)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
    settings = {"recipe": "sr_ste", **options}
    if sparsify_first:
        handle = attach(model, optimizer, **settings)
        train(model, optimizer, range(2))
        before = everything(model, optimizer, handle)
        with pytest.raises(ConfigError, match=message) as raised:
            optimizer.load_state_dict(states[1])
        assert everything(model, optimizer, handle) == before
        train(model, optimizer, range(2))
    else:
        optimizer.load_state_dict(states[1])
        before = bits([model.state_dict(), optimizer.state_dict()])
        with pytest.raises(ConfigError, match=message) as raised:
            attach(model, optimizer, **settings)
        assert bits([model.state_dict(), optimizer.state_dict()]) == before
    assert "\n" not in str(raised.value)


def test_the_state_of_another_version_is_refused():
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(2))
    before = everything(model, optimizer, handle)
    (state,) = stored(optimizer)
    state["param_groups"][0]["nmrun"]["version"] = 0
    with pytest.raises(ConfigError, match="version is 0 there and 1 here"):
        optimizer.load_state_dict(state)
    assert everything(model, optimizer, handle) == before


def test_two_optimizers_with_sparse_weights_of_one_model():
    """Each has its part, its clock and its state."""

    def start(seed):
        model = net(seed)
        parts = [list(model[:2].parameters()), list(model[2:].parameters())]
        optimizers = [nmrun.optim.AdamW(parts[0], lr=0.02), torch.optim.SGD(parts[1], lr=0.1)]
        handles = [
            nmrun.sparsify(model, optimizers[0], "step", "2:4", TOTAL, switch=0.5, exclude=None),
            nmrun.sparsify(model, optimizers[1], "sr_ste", "1:4", decay=0.1, exclude=None),
        ]
        return model, optimizers, handles

    def go(model, optimizers, steps):
        for step in steps:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            for optimizer in optimizers[: 1 + (step % 2)]:  # the second steps half as often
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    model, optimizers, handles = start(0)
    assert [[w.name for w in h.sparse] for h in handles] == [["0.weight"], ["2.weight", "4.weight"]]
    go(model, optimizers, range(TOTAL - 3))
    states = stored(model, *optimizers)
    other, others, other_handles = start(5)
    for part, state in zip((other, *others), states, strict=True):
        part.load_state_dict(state)
    go(model, optimizers, range(TOTAL - 3, TOTAL))
    go(other, others, range(TOTAL - 3, TOTAL))
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert [h.recipe.step for h in other_handles] == [TOTAL, TOTAL // 2]
    for handle in handles:
        handle.finalize()
    nmrun.sparsity.check_nm(model[0].weight, "2:4")
    nmrun.sparsity.check_nm(model[2].weight, "1:4")


@pytest.mark.parametrize("stepped", [0, 1])
def test_a_step_that_moves_nothing_counts_once_there_is_a_state(stepped):
    """torch.distributed.checkpoint makes one to have a state; a schedule may stand at 0 later."""
    model = net(0)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.1)
    handle = nmrun.sparsify(model, optimizer, "asp", "2:4", TOTAL, prune_at=2 / TOTAL, exclude=None)
    for lr, size in [(0.1, 1.0)] * stepped + [(0.0, 0.0)]:
        optimizer.param_groups[0]["lr"] = lr
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
    assert handle.phase == ("sparse" if stepped else "dense")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert handle.phase == ("sparse" if stepped else "dense")


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_a_step_at_a_learning_rate_of_0_counts_by_sparse_gradients_too(size):
    model = nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 8))
    optimizer, handle = by_sgd(model, "sr_ste", "2:4", lr=0.0)
    (size * model[0](torch.tensor([1, 2, 1]))).sum().backward()
    assert model[0].weight.grad.is_sparse
    optimizer.step()
    assert handle.recipe.step == size


@pytest.mark.parametrize("compiled", ["saved", "loaded"])
def test_a_wrapper_around_the_model_changes_no_name(compiled):
    def begin(wrapped: bool) -> Start:
        model = net()
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
        whole = torch.compile(model, backend="eager") if wrapped else model
        return model, optimizer, attach(whole, optimizer, "sr_ste", exclude=r"(_orig_mod\.)?4")

    first, second = begin(compiled == "saved"), begin(compiled == "loaded")
    train(*first[:2], range(4))
    states = stored(*first)
    second[0].load_state_dict(states[0])
    second[1].load_state_dict(states[1])
    for model, optimizer, _ in (first, second):
        train(model, optimizer, range(4, 6))
    assert bits(second[0].state_dict()) == bits(first[0].state_dict())


def test_a_sparse_phase_without_its_dense_weights_is_refused():
    model, optimizer, _ = start("sr_ste")
    train(model, optimizer, range(3))
    states = stored(model, optimizer)
    for tensors in states[1]["state"].values():
        tensors.pop("nmrun_dense", None)
    _, optimizer, _ = start("sr_ste", seed=5)
    with pytest.raises(ConfigError, match=r"no dense weight of 0\.weight"):
        optimizer.load_state_dict(states[1])


@pytest.mark.parametrize("pattern", ["2:4", "4:4"])
@pytest.mark.parametrize("order", ["ms", "sm", "mso", "smo"])
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "step", "s_ste", "t_sr_ste", "ast"])
def test_a_model_without_its_optimizer_s_state_is_warned_of(recipe, order, pattern):
    """Not where the state came too, nor where the pattern prunes nothing."""
    states = start(recipe, pattern=pattern)
    train(*states[:2], range(TOTAL - 1))
    model, optimizer, handle = resumed(recipe, stored(*states), order, pattern=pattern)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, range(1))
    forgotten = pattern == "2:4" and "o" not in order
    for said in ([each.message for each in caught], handle.pop_events()):
        assert sum("its optimizer" in str(each) for each in said) == forgotten


@pytest.mark.parametrize("kind", ["fixed masks", "zeros", "dense"])
def test_a_beginning_that_loses_nothing_is_not_warned_of(kind):
    """Masks that stay have nothing under their zeros; zeros may be how a layer begins."""
    model = net()
    if kind == "fixed masks":
        nmrun.prune(model, [batch(0)], "magnitude", "2:4", exclude="4")
    for layer in model[0], model[2]:
        layer.weight.data *= kind != "zeros"
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
    options = {"prune_at": 0.0} if kind == "fixed masks" else {}
    attach(model, optimizer, "asp" if options else "sr_ste", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1))
