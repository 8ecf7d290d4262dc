"""LBC and MaskLLM: ties, the bonus that falls to 0, which masks are measured and evaluated."""

from __future__ import annotations

import pytest
import torch
from reference import LR, Net, data, train_step
from test_candidates import MASKS, maskllm
from torch import Tensor, nn
from training import by_sgd


def rows(numbers: Tensor) -> Tensor:
    """The masks of groups of 4 by the number of their candidate, one row after the other."""
    mask = torch.zeros(numbers.numel(), 4)
    for row, number in zip(mask, numbers.flatten().tolist(), strict=True):
        row[MASKS[number]] = 1.0
    return mask


# --- LBC ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_scores_lbc_keeps_the_larger_weights(dtype):
    """Inputs that are always 0, as behind a dead ReLU, give every candidate the same score."""
    layer = nn.Linear(16, 4, bias=False).to(dtype)
    model = nn.Sequential(layer)
    optimizer, handle = by_sgd(model, "lbc", "2:4", 10, t_f=0.5)
    expected = layer.weight.detach().abs().reshape(-1, 4).argsort(1, descending=True)[:, :2]
    for _ in range(10):
        model(torch.zeros(3, 16, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.finalize()
    indices = layer.weight.detach().reshape(-1, 4).nonzero()[:, 1].reshape(-1, 2)
    assert torch.equal(indices.sort(1).values, expected.sort(1).values)


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "rate", "options"),
    [("lbc", 40.0, {"t_f": 0.9}), ("maskllm", 0.005, {"dense": 0.0, "prior": 0.0})],
)
def test_flips_are_of_the_candidates_with_the_best_scores(recipe, rate, options):
    """Until the end too, so that no jump comes with the last step."""
    model, total = Net(), 10
    optimizer, handle = by_sgd(model, recipe, "2:4", total, lr=rate * LR, **options)

    def best():
        masks = []
        for weight in handle.sparse:
            scores = handle.recipe.scores(weight).detach()
            if recipe == "lbc":
                scores = scores.masked_fill(~weight["alive"], -torch.inf)
            masks.append(rows(scores.argmax(-1)))
        return masks

    flips = []
    train_step(model, optimizer, data(1)(0))  # at the very first, LBC's scores are all alike
    for t in range(1, total):
        before, handle.measure_flips = best(), True
        train_step(model, optimizer, data(1)(t))
        changed = sum(int((a != b).sum()) for a, b in zip(before, best(), strict=True))
        assert handle.metrics()["sparsity/sad"] == changed
        flips.append(changed)
    assert sum(flips) > 0


# --- MaskLLM --------------------------------------------------------------------------------------


def test_the_bonus_falls_to_0():
    """Without a loss the logits move by the bonus alone: reg * (1 - it / n), by autograd."""
    kappa, temperature, reg, total = 2.0, 1.5, 0.5, 4
    model, optimizer, handle = maskllm(
        total, dense=0.0, kappa=(kappa,) * 2, temperature=(temperature,) * 2, reg=reg, prior=0.0
    )
    x = data(1)(0)[0][0]
    for it in range(total):
        expected = []
        for weight in handle.sparse:
            scores, blend = handle.recipe.scores(weight).detach(), handle.recipe.soft[weight.name]
            noise = temperature * blend.log() - kappa * scores  # up to a constant a group
            leaf = scores.clone().requires_grad_()
            soft = torch.softmax((kappa * leaf + noise) / temperature, -1)
            of_masks = torch.stack([rows(torch.tensor(k))[0] for k in range(6)]).to(soft.dtype)
            used = weight.dense * (soft @ of_masks).reshape(weight.dense.shape)
            bonus = -reg * (1 - it / total) * used.square().sum()
            expected.append(leaf.detach() - 10 * LR * torch.autograd.grad(bonus, leaf)[0])
        (0.0 * model(x).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for weight, moved in zip(handle.sparse, expected, strict=True):
            torch.testing.assert_close(handle.recipe.scores(weight).detach(), moved)


def test_evaluation_is_by_the_likeliest_masks():
    model, optimizer, handle = maskllm(6, dense=0.5)
    for t in range(6):
        used = [p.detach().clone() for p in model.parameters()]
        versions = [w.parameter._version for w in handle.sparse]
        learning = handle.phase == "transition"
        assert handle.evaluates_sparse == (t >= 3)
        with handle.evaluation_weights():
            for weight in handle.sparse if learning else ():
                mask = rows(handle.recipe.scores(weight).detach().argmax(-1))
                expected = weight.dense * mask.reshape(weight.dense.shape)
                assert torch.equal(weight.parameter.detach(), expected)
                assert not torch.equal(weight.parameter.detach(), weight.dense)
        # and training goes on as if nobody had looked
        assert all(torch.equal(a, b) for a, b in zip(used, model.parameters(), strict=True))
        assert learning or versions == [w.parameter._version for w in handle.sparse]
        train_step(model, optimizer, data(1)(t))
        assert not [event for event in handle.pop_events() if event.kind == "outside"]
    assert handle.phase == "sparse"


def test_a_weight_of_one_group_that_keeps_all_stays_as_it_is():
    layer = nn.Linear(4, 1)
    before = layer.weight.detach().clone()
    optimizer, handle = by_sgd(layer, "maskllm", "4:4", 3, dense=0.0)
    for _ in range(3):
        assert torch.equal(layer.weight.detach(), before)
        layer(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.finalize()
    assert torch.equal(layer.weight.detach(), before)


def test_a_step_too_many_moves_nothing_after_a_resume_either():
    model, optimizer, _ = maskllm(total=3, dense=0.4)
    for t in range(3):
        train_step(model, optimizer, data(1)(t))
    other, second, _ = maskllm(total=3, dense=0.4)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.warns(UserWarning, match="one step more than total_steps"):
        train_step(other, second, data(1)(3))
    assert all(map(torch.equal, other.parameters(), before))
