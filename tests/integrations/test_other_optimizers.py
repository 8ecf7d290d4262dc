"""Optimizers that call, contain or save others, and code that writes weights beside an optimizer."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from errors import one_line
from torch import Tensor, nn
from training import (
    TOTAL,
    attach,
    batch,
    bits,
    everything,
    net,
    recipe_tensors,
    start,
    stored,
    train,
)

import nmrun
from nmrun.errors import ConfigError, RunError


class Calls(torch.optim.AdamW):
    """Its step calls torch's. torch gives both of them hooks once it has made a plain AdamW."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails:
            raise ZeroDivisionError
        return loss


class CallsOurs(nmrun.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(
    ("kind", "base"), [(Calls, torch.optim.AdamW), (CallsOurs, nmrun.optim.AdamW)]
)
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "s_ste", "bi_mask", "lbc"])
def test_a_step_that_calls_another_is_one_step(recipe, kind, base, closure):
    """As the class that it calls does."""
    base([nn.Parameter(torch.zeros(1))])
    results = []
    for cls in (kind, base):
        model = net()
        optimizer = cls(model.parameters(), lr=0.02)
        handle = attach(model, optimizer, recipe)
        for step in range(TOTAL):

            def loss(model=model, step=step):
                out = model(batch(step)).square().mean()
                out.backward()
                return out

            if closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            optimizer.zero_grad()
            assert handle.recipe.step == step + 1
        results.append((everything(model, optimizer, handle), handle.pop_events()))
        handle.finalize()
    assert results[0] == results[1]


def test_after_such_a_step_failed_the_next_one_counts():
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    model = net()
    optimizer = Calls(model.parameters(), lr=0.02)
    handle = attach(model, optimizer, "sr_ste")
    train(model, optimizer, range(2))
    optimizer.fails = True
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, [2])
    optimizer.fails = False
    train(model, optimizer, range(2, 5))
    assert handle.recipe.step == 5
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude="4")


# --- weights that move elsewhere ------------------------------------------------------------------


class InBackward(torch.optim.Optimizer):
    """Moves each parameter as soon as its gradient is there; its own step does nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        every = list(parameters)
        super().__init__(every, {"lr": 0.02})
        for parameter in every:
            optimizer = torch.optim.AdamW([parameter], lr=0.02)
            parameter.register_post_accumulate_grad_hook(self._moving(optimizer))

    @staticmethod
    def _moving(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return move

    def step(self, closure: Any = None) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:nmrun")
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "s_ste"])
def test_an_optimizer_that_moves_weights_in_the_backward_pass_is_an_error(recipe):
    model = net()
    optimizer = InBackward(model.parameters())
    handle = attach(model, optimizer, recipe)
    with one_line(RunError, r"before each of 3 steps.* in the backward pass"):
        train(model, optimizer, range(TOTAL))
    assert handle.recipe.step == {"asp": 7}.get(recipe, 2)


def test_one_handle_for_each_optimizer_of_the_backward_pass_trains_as_one_for_all():
    """What the page recommends. AdamW moves each parameter by itself."""
    model, plain = net(), net()
    other = torch.optim.AdamW(plain.parameters(), lr=0.02)
    one = attach(plain, other, "sr_ste")
    train(plain, other, range(TOTAL))
    one.finalize()
    optimizers = [torch.optim.AdamW([p], lr=0.02) for p in model.parameters()]
    handles = [
        nmrun.sparsify(model, optimizers[i], "sr_ste", "2:4", TOTAL, decay=0.1, exclude=None)
        for i in (0, 2)
    ]
    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(InBackward._moving(optimizer))
    for step in range(TOTAL):
        model(batch(step)).square().mean().backward()
    for handle in handles:
        handle.finalize()
    assert bits(model.state_dict()) == bits(plain.state_dict())


# --- state dicts of their own ---------------------------------------------------------------------


class Container(torch.optim.Optimizer):
    """Several optimizers as one, whose states are saved by the container."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): each.state_dict() for i, each in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, each in enumerate(self.optimizers):
            each.load_state_dict(state_dict[str(i)])


class SavesLess(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": super().state_dict()["param_groups"], "state": {}}


class SavesOtherwise(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {"rates": [group["lr"] for group in self.param_groups]}


class SavesMore(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


@pytest.mark.parametrize("recipe", ["sr_ste", "asp"])
def test_a_container_is_refused_and_what_it_has_inside_is_not(recipe):
    model = net()
    container = Container(torch.optim.AdamW(model.parameters(), lr=0.02))
    before = everything(model, container)
    message = "Container leaves the dense weights out .* sparsify each optimizer in it"
    with one_line(ConfigError, message):
        attach(model, container, recipe)
    assert everything(model, container) == before
    plain = net()
    other = torch.optim.AdamW(plain.parameters(), lr=0.02)
    handles = attach(model, container.optimizers[0], recipe), attach(plain, other, recipe)
    train(model, container, range(6))
    train(plain, other, range(6))
    again = net(3)
    second = Container(torch.optim.AdamW(again.parameters(), lr=0.02))
    states = stored(model, container)
    resumed = attach(again, second.optimizers[0], recipe)
    again.load_state_dict(states[0])
    second.load_state_dict(states[1])
    train(again, second, range(6, TOTAL))
    train(plain, other, range(6, TOTAL))
    for handle in (handles[1], resumed):
        handle.finalize()
    assert bits(again.state_dict()) == bits(plain.state_dict())


@pytest.mark.parametrize("kind", [SavesLess, SavesOtherwise])
def test_a_state_dict_without_the_dense_weights_is_refused(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.02)
    before = bits(model.state_dict())
    with one_line(ConfigError, f"{kind.__name__} leaves the dense weights out"):
        attach(model, optimizer, "sr_ste")
    assert bits(model.state_dict()) == before
    assert recipe_tensors(optimizer) == {}
    assert "nmrun" not in optimizer.param_groups[0]
    plain = net()
    other = kind(plain.parameters(), lr=0.02)
    train(model, optimizer, range(3))
    train(plain, other, range(3))
    assert bits(model.state_dict()) == bits(plain.state_dict())


def test_a_state_dict_that_adds_something_is_none_of_our_business():
    saved = []
    for kind in (SavesMore, torch.optim.AdamW):
        model = net()
        optimizer = kind(model.parameters(), lr=0.02)
        attach(model, optimizer, "sr_ste")
        train(model, optimizer, range(3))
        saved.append(bits(optimizer.state_dict()))
    assert saved[0] == {**saved[1], "more": 1}


# --- added parameters and frozen weights ----------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize("recipe", ["lbc", "maskllm"])
def test_muon_cannot_move_scores_which_are_no_matrices(recipe):
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    before = everything(model, optimizer)
    with one_line(ConfigError, "Muon moves matrices alone"):
        attach(model, optimizer, recipe, exclude=())
    assert everything(model, optimizer) == before


class WantsEveryGradient(torch.optim.SGD):
    """As Muon by its author does: a missing gradient is 0, and momentum moves the parameter on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().step(closure)


@pytest.mark.parametrize("recipe", ["maskllm", "proxsparse"])
def test_frozen_weights_that_are_moved_are_an_error(recipe):
    model = net()
    optimizer = WantsEveryGradient(model.parameters(), lr=0.02, momentum=0.9)
    attach(model, optimizer, recipe, dense=0.5)
    train(model, optimizer, range(TOTAL // 2))
    with one_line(RunError, f"{recipe} freezes weights, and WantsEveryGradient"):
        train(model, optimizer, [TOTAL // 2])


# --- what is told ---------------------------------------------------------------------------------


def test_events_reach_the_log_once(caplog):
    caplog.set_level(logging.INFO, "nmrun")
    model, optimizer, handle = start("asp")
    train(model, optimizer, range(3))
    handle.pop_events()
    train(model, optimizer, range(3, TOTAL))
    logged = [record.getMessage() for record in caplog.records if record.name == "nmrun"]
    assert logged == list(map(str, handle.pop_events()))
    assert len(logged) == 1


def test_weights_from_outside_and_a_step_too_many_are_warned_of_once():
    model, optimizer, handle = start("sr_ste")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(TOTAL + 3):
            if step in (3, 6):
                model.load_state_dict(net(step).state_dict())
            train(model, optimizer, [step])
    messages = [str(each.message) for each in caught]
    assert len(messages) == 2
    assert re.match(r"nmrun: step 3: 0\.weight and 1 more changed outside", messages[0])
    assert re.match(r"nmrun: step 11: .* one step more than total_steps=10", messages[1])
    assert len(handle.pop_events()) == 3


class CountsBeside(torch.optim.SGD):
    """Keeps a tensor and a number that belong to no parameter, as MADGRAD and SPAM of
    pytorch_optimizer do; its rate falls by them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["k"], self.state["steps"] = torch.zeros(2, dtype=torch.long), 0  # type: ignore[index]

    def step(self, closure: Any = None) -> Any:
        self.state["k"] += 1  # type: ignore[index]
        self.state["steps"] += 1  # type: ignore[index]
        count = int(self.state["k"].sum()) + self.state["steps"]  # type: ignore[index]
        self.param_groups[0]["lr"] = 0.1 / count
        return super().step(closure)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # of packages
    "MADGRAD": ("pytorch_optimizer", {}),
    "SPAM": ("pytorch_optimizer", {"density": 1.0}),  # it draws the weights that it updates: all
    # moments of small weights in 8 bits as well; its load_state_dict calls none of torch's hooks
    "AdamW8bit": ("bitsandbytes.optim", {"min_8bit_size": 0}),
}


@pytest.mark.parametrize("order", ["sparsify first", "load first"])
@pytest.mark.parametrize("stop", [0, 3, 7])
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "s_ste", "bi_mask"])
@pytest.mark.parametrize("kind", ["CountsBeside", *OTHERS])
def test_states_of_their_own_are_saved_and_loaded(kind, recipe, stop, order):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "CountsBeside":
            return CountsBeside(model.parameters())
        module, options = OTHERS[kind]
        package: Any = pytest.importorskip(module, reason=f"needs {module}")
        optimizer: torch.optim.Optimizer = getattr(package, kind)(
            model.parameters(), lr=0.02, **options
        )
        return optimizer

    model = net()
    optimizer = make(model)
    handle = attach(model, optimizer, recipe)
    train(model, optimizer, range(stop))
    states = stored(model, optimizer)
    train(model, optimizer, range(stop, TOTAL))
    if kind == "AdamW8bit":
        assert optimizer.state[model[0].weight]["state1"].dtype == torch.uint8
    again = net(3)
    other = make(again)
    second = attach(again, other, recipe) if order == "sparsify first" else None
    again.load_state_dict(states[0])
    other.load_state_dict(states[1])
    second = second or attach(again, other, recipe)
    train(again, other, range(stop, TOTAL))
    assert everything(again, other, second) == everything(model, optimizer, handle)
    second.finalize()
    nmrun.sparsity.check_nm(again, "2:4", exclude="4")
