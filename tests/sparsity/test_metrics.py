"""What a step did to masks, energies and gradient noise, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from training import by_sgd

import nmrun
from nmrun.sparsity import metrics
from nmrun.sparsity.metrics import gradient_variance, layer_metrics, mask_of, pack, split, unpack
from nmrun.step.handle import Handle

# three weights (2, 4), with 2:4 masks that can be read off: 1100 0011, then 1001 0011, then the
# first again
FIRST = [[4.0, 3.0, 2.0, 1.0], [-1.0, 2.0, -3.0, 4.0]]
SECOND = [[4.0, 1.0, 2.0, 3.0], [-1.0, 2.0, -3.0, 4.0]]


def start(recipe: str, **hyperparameters: Any) -> tuple[nn.Module, Any, Handle]:
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(FIRST))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return (
        model,
        optimizer,
        nmrun.sparsify(model, optimizer, recipe, "2:4", exclude=None, **hyperparameters),
    )


def move(
    handle: Handle, optimizer: Any, target: list[list[float]], measure: bool = True
) -> dict[str, float]:
    """One step of SGD that ends at ``target``."""
    weight = handle.sparse[0]
    weight.parameter.grad = weight.dense - torch.tensor(target)
    handle.measure_flips = measure
    optimizer.step()
    assert torch.equal(weight.dense, torch.tensor(target))
    return handle.metrics()


RECIPES = {
    "ste": {},
    "asp": {"prune_at": 0.9, "total_steps": 10},  # dense: the mask is a virtual one
    # faded, not pruned: a virtual one too
    "mdgf_linear": {"tau": 0.01, "dense": 0.0, "total_steps": 10, "grad_mode": "ste"},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_flips_and_divergence_of_hand_made_masks(recipe):
    _, optimizer, handle = start(recipe, **RECIPES[recipe])
    keys = ("flip_rate", "flip_interval", "sad", "sad_since_first")
    for target, expected in (
        (SECOND, (2 / 8, 1, 2, 2 / 8)),
        (SECOND, (0, 1, 0, 2 / 8)),
        (FIRST, (2 / 8, 1, 2, 0)),
    ):
        logged = move(handle, optimizer, target)
        assert tuple(logged[f"sparsity/{key}"] for key in keys) == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_energy_and_norm_in_closed_form(recipe):
    _, optimizer, handle = start(recipe, **RECIPES[recipe])
    logged = move(handle, optimizer, SECOND)
    assert logged["sparsity/kept_energy"] == pytest.approx((16 + 9 + 9 + 16) / 60)
    assert logged["sparsity/pruned_norm"] == pytest.approx(math.sqrt(1 + 4 + 1 + 4))
    layer = layer_metrics(handle.sparse, handle.recipe)
    assert layer["layer/0.weight/kept_energy"] == pytest.approx(50 / 60)
    assert layer["layer/0.weight/density"] == (0.5 if recipe == "ste" else 1.0)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_energies_are_summed_over_all_pieces(dtype, size, monkeypatch):
    monkeypatch.setattr(metrics, "PIECE", 7)
    weight, mask = (size * torch.randn(5, 3, 2)).to(dtype), torch.rand(5, 3, 2) < 0.4
    kept_energy, pruned_energy = split(weight, mask, squares=True)
    for energy, part in ((kept_energy, mask), (pruned_energy, ~mask)):
        expected = math.fsum(weight[part].double().square().tolist())
        assert float(energy) == pytest.approx(expected, rel=1e-6)
    assert split(weight.new_zeros(0, 4), mask.new_zeros(0, 4), squares=True) == [0, 0]


def test_a_weight_that_is_zero_is_in_no_mask():
    """Virtual masks are the support of the projection, not the places of the largest."""
    _, _, handle = start("asp", prune_at=0.9, total_steps=10)
    with torch.no_grad():
        handle.sparse[0].parameter[0] = torch.tensor([0.0, 0.0, 0.0, 5.0])
    assert mask_of(handle.sparse[0], handle.recipe)[0].tolist() == [False, False, False, True]


def test_the_first_masks_are_those_of_the_beginning_and_are_saved():
    _, optimizer, handle = start("ste")
    handle.stepper.mask_metrics.begin()
    move(handle, optimizer, SECOND, measure=False)
    assert handle.metrics() == {}
    assert move(handle, optimizer, SECOND)["sparsity/sad_since_first"] == 2 / 8
    _other, other_optimizer, other_handle = start("ste")
    with torch.no_grad():
        other_handle.sparse[0].dense.copy_(torch.tensor(SECOND))
        other_handle.refresh()
    # a resumed process begins too, from whatever it was built with
    other_handle.stepper.mask_metrics.begin()
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert move(other_handle, other_optimizer, SECOND)["sparsity/sad_since_first"] == 2 / 8


def test_a_soft_threshold_keeps_what_it_does_not_shrink_to_zero():
    _, optimizer, handle = start("s_ste")
    assert mask_of(handle.sparse[0], handle.recipe).tolist() == [
        [True, True, False, False],
        [False, False, True, True],
    ]
    assert move(handle, optimizer, SECOND)["sparsity/sad"] == 2


def test_layers_with_patterns_of_their_own():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 3))
    options = {"exclude": ["1"], "overrides": {"2": "1:8"}}
    _, handle = by_sgd(model, "sr_ste", "2:4", **options)
    logged = layer_metrics(handle.sparse, handle.recipe)
    assert (logged["layer/0.weight/density"], logged["layer/2.weight/density"]) == (1 / 2, 1 / 8)
    largest = handle.sparse[1].dense.abs().max(1).values
    total = handle.sparse[1].dense.square().sum()
    assert logged["layer/2.weight/kept_energy"] == pytest.approx(
        float(largest.square().sum() / total), rel=1e-5
    )


def test_nothing_is_measured_in_dense_training():
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer, handle = by_sgd(model, "dense", "2:4")
    handle.stepper.mask_metrics.begin()
    handle.measure_flips = True
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert (handle.metrics(), layer_metrics(handle.sparse, handle.recipe)) == ({}, {})


# --- gradient noise -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, nmrun.optim.Adam])
def test_gradient_noise_is_the_spread_of_the_last_gradients(kind):
    """Variance with Adam's weights, by hand, apart for kept and pruned weights: noise of size 3
    goes to the pruned ones.
    """
    beta1, beta2, steps = 0.8, 0.9, 12
    model = nn.Sequential(nn.Linear(4, 50, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([8.0, 4.0, 2.0, 1.0]) * torch.randn(50, 4).sign())
    optimizer = kind(model.parameters(), lr=1e-9, betas=(beta1, beta2), weight_decay=0.0)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", exclude=None)
    handle.measure_flips = True
    gradients = [
        0.5 + torch.tensor([0.1, 0.1, 3.0, 3.0]) * torch.randn(50, 4) for _ in range(steps)
    ]
    for gradient in gradients:
        handle.sparse[0].parameter.grad = gradient.clone()
        optimizer.step()
    weights = [
        [(1 - beta) * beta ** (steps - 1 - t) / (1 - beta**steps) for t in range(steps)]
        for beta in (beta1, beta2)
    ]
    mean, square = (
        sum(w * g.double() ** power for w, g in zip(some, gradients, strict=True))
        for some, power in zip(weights, (1, 2), strict=True)
    )
    expected = square - mean**2
    logged = handle.metrics()
    kept, pruned = (logged[f"sparsity/gradient_noise_{part}"] for part in ("kept", "pruned"))
    assert kept == pytest.approx(float(expected[:, :2].mean()), rel=1e-4)
    assert pruned == pytest.approx(float(expected[:, 2:].mean()), rel=1e-4)
    assert pruned > 100 * kept
    estimate = gradient_variance([handle.sparse[0].parameter], optimizer)
    torch.testing.assert_close(estimate[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_without_moments_there_is_no_noise():
    _, optimizer, handle = start("ste")
    assert not any("noise" in key for key in move(handle, optimizer, SECOND))
    model = nn.Sequential(nn.Linear(4, 2))
    adam = nmrun.optim.Adam(model.parameters())
    handle = nmrun.sparsify(model, adam, "step", "2:4", total_steps=4, switch=0.5, exclude=None)
    handle.measure_flips = True
    seen = []
    for _ in range(4):
        model(torch.ones(1, 4)).sum().backward()
        adam.step()
        seen.append("sparsity/gradient_noise_kept" in handle.metrics())
    assert seen == [True, False, False, False]  # frozen with the second step


# --- at no price ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["sr_ste", "s_ste", "step", "asp", "mdgf_linear", "t_sr_ste"])
def test_measuring_changes_no_bit(recipe):
    def train(measure):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.05)
        handle = nmrun.sparsify(model, optimizer, recipe, "2:4", total_steps=10, exclude=None)
        for _ in range(10):
            handle.measure_flips = measure
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if measure:
                assert "sparsity/flip_rate" in handle.metrics()
                layer_metrics(handle.sparse, handle.recipe)
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, train(True), train(False)))


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 5), (2, 4, 3, 3)])
def test_packed_masks_come_back(shape):
    mask = torch.rand(shape) < 0.5
    packed = pack(mask)
    assert (packed.dtype, packed.numel()) == (torch.uint8, -(-mask.numel() // 8))
    assert torch.equal(unpack(packed, shape), mask)
