"""STEP's learning rate of its own in phase two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nmrun

STEPS, FACTOR = 10, 4.0


def trained(factor: float, by_hand: float = 1.0, rate: float | torch.Tensor = 1e-2) -> torch.Tensor:
    """The weights after ten steps, whose phase two begins after five."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    nmrun.sparsify(
        model, optimizer, recipe="step", pattern="2:4", total_steps=STEPS, exclude=(), switch=0.5,
        lr_factor=factor,
    )  # fmt: skip
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.param_groups[0]["lr"] = rate * by_hand
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rate * (by_hand if step >= STEPS // 2 else 1)
    return model.weight.detach().clone()


def test_phase_two_has_a_learning_rate_of_its_own():
    assert torch.equal(trained(FACTOR), trained(1.0, by_hand=FACTOR))
    assert not torch.equal(trained(FACTOR), trained(1.0))


@pytest.mark.parametrize("saves", [False, True])
def test_the_learning_rate_is_the_user_s_again_after_a_step_that_failed(saves):
    model = nn.Linear(16, 4)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=1e-2)
    handle = nmrun.sparsify(
        model, optimizer, recipe="step", pattern="2:4", total_steps=5, exclude=(), switch=0.2,
        lr_factor=FACTOR,
    )  # fmt: skip
    betas = optimizer.param_groups[0]["betas"]
    for fails in (False, False, True, False, True):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.param_groups[0]["betas"] = None if fails else betas
        if fails:
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["betas"] = betas
            if saves:
                assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-2
        else:
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 1e-2
    handle.abandon()
    assert optimizer.param_groups[0]["lr"] == 1e-2
