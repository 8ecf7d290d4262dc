"""The gradients of many weights are edited in as many launches as those of one, to the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting import Operations

from nmrun.rule import Rule
from nmrun.sparsity.projections import edit_gradient, edit_gradients


def weights(count: int, device: str) -> list[Any]:
    torch.manual_seed(0)
    parameters = []
    for number in range(count):
        grad, dense = (torch.randn(16, 8 * (number + 1), device=device) for _ in range(2))
        parameters.append(
            SimpleNamespace(grad=grad, dense=dense, weight=dense * (dense.abs() > 0.5))
        )
    return parameters


@pytest.mark.parametrize("count", [1, 2, 50])
def test_launches_do_not_grow_with_the_weights(count):
    """On the meta device, a GPU's stand-in."""
    parameters = weights(count, "meta")
    with Operations() as mode:
        edit_gradients(parameters, [Rule(pruned_gradient_decay=2e-4)] * count)
    assert mode.count == 2


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize(
    "rules",
    [
        [Rule(pruned_gradient_decay=2e-4)] * 4,
        [Rule(pruned_gradient_decay=decay) for decay in (2e-4, 0.0, 3e-3, 2e-4)],
        [Rule(pruned_gradient_factor=factor) for factor in (0.0, 1.0, 0.5, 0.0)],
    ],
)
def test_the_same_bits_as_one_by_one(device, rules):
    together, apart = weights(4, device), weights(4, device)
    edit_gradients(together, rules)
    for one, rule in zip(apart, rules, strict=True):
        edit_gradient(one.grad, one.dense, one.weight, rule)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(together, apart, strict=True))


def test_a_rule_decays_gradients_or_scales_them():
    """What would come first is not the same in torch, C and Triton."""
    with pytest.raises(ValueError, match="not both"):
        Rule(pruned_gradient_decay=0.1, pruned_gradient_factor=0.0)


def test_a_rule_decays_gradients_of_weights_that_become_0():
    """Of others the projection does not tell (1 - m) * w. Two rules in a row may do so: the gradient
    goes by the projection before."""
    for kept in ({"pruned_weight_factor": 0.5}, {"soft_threshold_scale": torch.ones(())}):
        with pytest.raises(ValueError, match="only where pruned weights become 0"):
            Rule(pruned_gradient_decay=0.1, **kept)
        after = Rule(**kept)
        fused = Rule(pruned_gradient_decay=0.1).then(after)
        assert fused.pruned_gradient_decay == 0.1
        assert fused.projects_as(after)
