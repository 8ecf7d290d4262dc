"""A recipe's own choice of masks is asked, by whoever steps; and a recipe as an object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from reference import DECAY, LR, TOTAL, ByHand, Net, data, train_step
from torch import Tensor, nn
from training import bits, by_sgd, everything, net, train

import nmrun
from nmrun.errors import RunError
from nmrun.recipes import SRSTE, STEP
from nmrun.recipes.base import Recipe

UPDATES = {
    "sgd": lambda params: torch.optim.SGD(params, 0.02),
    "adamw": lambda params: nmrun.optim.AdamW(params, 0.02),
    "fused adamw": lambda params: nmrun.optim.AdamW(params, 0.02, fused=True),
}


def first_two(w: Tensor) -> Tensor:
    mask = torch.zeros_like(w, dtype=torch.bool)
    mask.view(-1, 4)[:, :2] = True
    return mask


class FirstTwo(Recipe):
    name = "first_two"

    def choose(self, weight: Any) -> Tensor:
        return first_two(weight.dense)


@dataclass
class FirstTwoDecayed(SRSTE):
    name: ClassVar[str] = "first_two_decayed"

    def choose(self, weight: Any) -> Tensor:
        return first_two(weight.dense)


class Whole(Recipe):
    name = "whole"

    def choose(self, weight: Any) -> Tensor:
        return torch.ones_like(weight.dense, dtype=torch.bool)


class Alternates(Recipe):
    """The first two of four, then the last two, and so on."""

    name = "alternates"

    def choose(self, weight: Any) -> Tensor:
        mask = first_two(weight.dense)
        return mask if self.step % 2 == 0 else ~mask


def test_a_mask_that_keeps_too_many_is_named_at_the_end():
    model = net()
    optimizer, handle = by_sgd(model, Whole())
    optimizer.step()
    with pytest.raises(RunError, match=r"^0\.weight is not 2:4 after step 1"):
        handle.finalize()


@pytest.mark.usefixtures("kernels_for_small_weights")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", [FirstTwo, FirstTwoDecayed, Alternates])
def test_it_is_asked_at_every_step(kind, update):
    model = net()
    optimizer = UPDATES[update](model.parameters())
    handle = nmrun.sparsify(model, optimizer, kind(), "2:4", exclude=None)
    for step in range(5):
        for weight in handle.sparse:
            mask = first_two(weight.dense)
            mask = ~mask if kind is Alternates and step % 2 else mask
            assert torch.equal(weight.parameter, weight.dense * mask)
            assert not torch.equal(mask, nmrun.sparsity.nm_mask(weight.dense, "2:4"))
        train(model, optimizer, [step])
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)


@pytest.mark.parametrize("kind", [FirstTwo, FirstTwoDecayed])
def test_its_gradients_are_those_of_its_mask(kind):
    decay = DECAY if kind is FirstTwoDecayed else 0.0
    hand = ByHand(
        Net().used,
        lambda t, i, w: w * first_two(w),
        lambda t, i, w, g: g + decay * (~first_two(w)) * w,
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    rule = kind(decay=DECAY) if decay else kind()
    nmrun.sparsify(model, optimizer, rule, "2:4", TOTAL, exclude=None)
    for t in range(TOTAL):
        torch.testing.assert_close(model.used, hand.used, rtol=1e-9, atol=1e-12)
        train_step(model, optimizer, data(1)(t))
        hand.step(data(1)(t))


def test_an_object_is_what_its_name_and_hyperparameters_are():
    results = []
    for recipe, options in (("step", {"switch": 0.25, "decay": 0.1}), (STEP(0.25, decay=0.1), {})):
        model = net()
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
        handle = nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, exclude=None, **options)
        train(model, optimizer, range(TOTAL))
        results.append((everything(model, optimizer, handle), handle.pop_events()))
    assert results[0] == results[1]


def test_one_object_serves_two_models():
    recipe, alone = STEP(switch=0.5), STEP(switch=0.5)
    models = [net(), net(1)]
    optimizers = [nmrun.optim.AdamW(m.parameters(), lr=0.02) for m in models]
    handles = [
        nmrun.sparsify(m, o, recipe, ratio, TOTAL, exclude=None)
        for m, o, ratio in zip(models, optimizers, ("2:4", "1:4"), strict=True)
    ]
    train(models[0], optimizers[0], range(7))
    train(models[1], optimizers[1], range(3))
    assert [(h.recipe.step, h.phase) for h in handles] == [(7, "sparse"), (3, "dense")]
    assert [str(h.recipe.pattern) for h in handles] == ["2:4", "1:4"]
    assert [len(h.pop_events()) for h in handles] == [1, 0]
    assert (recipe.step, recipe.events) == (0, [])
    other = net()
    optimizer = nmrun.optim.AdamW(other.parameters(), lr=0.02)
    nmrun.sparsify(other, optimizer, alone, "2:4", TOTAL, exclude=None)
    train(other, optimizer, range(7))
    assert bits(other.state_dict()) == bits(models[0].state_dict())


def test_an_object_takes_no_hyperparameters_and_is_checked():
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = nmrun.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match="step is made already: give switch to its constructor"):
        nmrun.sparsify(model, optimizer, STEP(), "2:4", 10, switch=0.5, exclude=None)
    with pytest.raises(ValueError, match="sr_ste: decay=-1: it takes a number at least 0"):
        nmrun.sparsify(model, optimizer, SRSTE(decay=-1), "2:4", 10, exclude=None)
