"""Masks that stay for a while: STE with an interval, RNM-TD3's gradient, and T-SR-STE, against
loops written by hand.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
from reference import (
    LR,
    TOTAL,
    ByHand,
    Net,
    data,
    follow,
    largest_in_blocks,
    top,
    train_step,
    transposable,
)
from torch import Tensor, nn
from training import by_sgd

import nmrun
from nmrun.lab.train.flops import densities


def in_blocks(w: Tensor) -> Tensor:
    return largest_in_blocks(w, "4:2:8").to(w.dtype)


class Held:
    """Masks found at step 0 and every ``interval`` steps, kept in between."""

    def __init__(self, find: Any, interval: int) -> None:
        self.find, self.interval, self.masks = find, interval, {}

    def __call__(self, t: int, i: int, w: Tensor) -> Tensor:
        if (i, t // self.interval) not in self.masks:
            assert t % self.interval == 0
            self.masks[i, t // self.interval] = self.find(w)
        return self.masks[i, t // self.interval]


@pytest.mark.parametrize("gradient", ["ste", "masked"])
@pytest.mark.parametrize("interval", [1, 3])
def test_ste(interval, gradient):
    mask = Held(lambda w: top(w, 2, 4), interval)
    hand = ByHand(
        Net().used,
        lambda t, i, w: w * mask(t, i, w),
        lambda t, i, w, g: g * mask(t, i, w) if gradient == "masked" else g,
    )
    model = follow("ste_periodic", hand, interval=interval, gradient=gradient)
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)


@pytest.mark.parametrize("interval", [1, 4])
def test_t_sr_ste(interval):
    mask = Held(transposable, interval)
    hand = ByHand(
        Net().used,
        lambda t, i, w: w * mask(t, i, w),
        lambda t, i, w, g: g + 0.3 * (1 - mask(t, i, w)) * w,
    )
    model = follow("t_sr_ste", hand, interval=interval, decay=0.3)
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)
    for layer in (model[0], model[2]):
        nmrun.sparsity.check_nm(layer.weight.detach().T, "2:4")  # along the outputs too


@pytest.mark.parametrize("find", [transposable, in_blocks])
@pytest.mark.parametrize(
    ("recipe", "hyperparameters"),
    [
        ("ste", {}),
        ("ste_periodic", {"interval": 3, "gradient": "ste"}),
        ("ste_periodic", {"interval": 3}),
        ("sr_ste", {"decay": 0.3}),
        ("asp", {}),
    ],
    ids=str,
)
def test_other_masks_for_recipes_that_keep_the_largest(recipe, hyperparameters, find):
    mask, pruned_at = Held(find, hyperparameters.get("interval", 1)), TOTAL // 2
    fixed = Held(find, TOTAL + 1)

    def forward(t, i, w):
        if recipe == "asp":
            return w if t < pruned_at else w * fixed(0, i, w)
        return w * mask(t, i, w)

    def edit(t, i, w, g):
        if recipe == "asp":
            return g if t < pruned_at else g * fixed(0, i, w)
        if recipe == "ste_periodic" and "gradient" not in hyperparameters:
            return g * mask(t, i, w)
        return g + hyperparameters.get("decay", 0) * (1 - mask(t, i, w)) * w

    hand = ByHand(Net().used, forward, edit)
    if find is in_blocks:
        model = follow(recipe, hand, "4:2:8", **hyperparameters)
        nmrun.sparsity.check_nm(model, "4:2:8", exclude=None)
        return
    model = follow(recipe, hand, input_gradient="transposable", **hyperparameters)
    for layer in (model[0], model[2]):
        nmrun.sparsity.check_nm(layer.weight.detach(), "2:4")
        nmrun.sparsity.check_nm(layer.weight.detach().T, "2:4")


def test_step_learns_transposable_masks():
    model = Net()
    optimizer = nmrun.optim.Adam(model.parameters(), LR)
    handle = nmrun.sparsify(
        model, optimizer, "step", "2:4", 6, switch=0.5, input_gradient="transposable", exclude=None
    )
    for t in range(6):
        density = 0.5 if t >= 3 else 1.0
        assert densities(handle.recipe, handle.sparse[0], t, hardware=True)[:2] == (density,) * 2
        for w in handle.sparse:
            mask = transposable(w.dense.detach())
            assert torch.equal(w.weight, w.dense * mask if t >= 3 else w.dense)
            assert torch.equal(nmrun.sparsity.metrics.mask_of(w, handle.recipe), mask.bool())
        model(data(1)(t)[0][0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["s_ste", "bi_mask", "mdgf_linear", "lbc", "maskllm"])
def test_who_has_masks_of_its_own_keeps_them(recipe):
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = nmrun.optim.Adam(model.parameters())
    for value, message in (
        ("transposable", rf"^{recipe} has masks of its own: transposable ones"),
        ("dense", "input_gradient=dense: it takes one of exact, transposable, double_prune, mvue"),
    ):
        with pytest.raises(ValueError, match=message):
            nmrun.sparsify(model, optimizer, recipe, "2:4", 10, input_gradient=value, exclude=None)


def test_the_dense_end_is_dense_and_not_called_sparse():
    mask = Held(transposable, 40)
    model = Net()
    optimizer, handle = by_sgd(model, "t_sr_ste", "2:4", 6, lr=LR, dense_end=0.5, decay=0.3)
    hand = ByHand(
        Net().used,
        lambda t, i, w: w * mask(0, i, w) if t < 3 else w,
        lambda t, i, w, g: g + 0.3 * (1 - mask(0, i, w)) * w if t < 3 else g,
    )
    batches = data(1)
    for t in range(6):
        assert handle.is_sparse == (t < 3)
        train_step(model, optimizer, batches(t))
        hand.step(batches(t))
    assert not any(layer["holds"] for layer in handle.report()["layers"])
    handle.finalize()
    torch.testing.assert_close(model.used, hand.used, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("dense_end", "steps", "sparse"),
    [(0.01, 6, 5), (0.999, 6, 1), (0.5, 2, 1), (0.5, 1, 1), (0.75, 1, 1)],
)
def test_a_dense_end_of_nearly_no_or_all_steps(dense_end, steps, sparse):
    model = Net()
    optimizer, handle = by_sgd(model, "t_sr_ste", "2:4", steps, lr=LR, dense_end=dense_end)
    batches, were_sparse = data(1), []
    for t in range(steps):
        were_sparse.append(handle.is_sparse)
        assert handle.recipe.planned_dense(t) != handle.is_sparse
        train_step(model, optimizer, batches(t))
    assert were_sparse == [t < sparse for t in range(steps)]
    assert not any(layer["holds"] for layer in handle.report()["layers"])


def test_transposable_at_every_kernel_position():
    model = nn.Sequential(nn.Conv2d(8, 4, 3))
    _, handle = by_sgd(model, "t_sr_ste", "2:4", 10)
    dense = handle.sparse[0].dense.detach()
    for y, x in itertools.product(range(3), range(3)):
        assert torch.equal(model[0].weight[:, :, y, x] != 0, transposable(dense[:, :, y, x]).bool())


@pytest.mark.parametrize(
    ("recipe", "input_gradient"),
    [("t_sr_ste", "exact"), ("t_sr_ste", "transposable"), ("ste", "transposable")],
)
def test_a_layer_whose_outputs_do_not_fit_stays_dense(recipe, input_gradient):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
    _, handle = by_sgd(model, recipe, "2:4", 10, input_gradient=input_gradient)
    assert [w.name for w in handle.sparse] == ["0.weight"]
    reason = "6 outputs are not a multiple of 4, which a transposable mask needs"
    assert handle.left_dense[0].reason == reason


@pytest.mark.parametrize(("outputs", "fits"), [(16, False), (32, True)])
def test_transposable_within_the_groups_of_a_convolution(outputs, fits):
    """The input gradient sums over the outputs of one group alone."""
    model = nn.Sequential(nn.Conv2d(64, outputs, 1, groups=8), nn.Conv2d(outputs, 8, 1))
    _, handle = by_sgd(model, "ste", "2:4", input_gradient="transposable")
    assert ("0.weight" in [w.name for w in handle.sparse]) == fits
    if fits:
        kept = (model[0].weight != 0).view(8, 4, 8).sum(1)
        assert bool((kept == 2).all())
    else:
        assert handle.left_dense[0].reason.startswith("2 outputs are not a multiple of 4")


def test_a_copy_keeps_the_mask_of_what_it_averages():
    model = Net()
    optimizer, handle = by_sgd(model, "ste_periodic", "2:4", 10, lr=0.0, interval=2)
    with handle.dense_weights(), torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(1))
        ema = copy.deepcopy(model)
    optimizer.step()
    optimizer.step()  # the mask is chosen anew here
    with torch.no_grad():
        ema[0].weight.fill_(1.0)
    handle.finalize(ema)
    assert torch.equal(ema[0].weight, (model[0].weight != 0).double())
