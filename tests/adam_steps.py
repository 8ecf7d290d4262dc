"""What a rule does around a step of Adam, once more, by the functions for users.

For the tests of the kernels that do it in one pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nmrun.kernels.layout import Update
from nmrun.patterns import Pattern
from nmrun.rule import Rule
from nmrun.sparsity import nm_mask, reference

# fields of Rule; a mask is held where there is one
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "decayed": {"pruned_gradient_decay": 0.02},
    "decayed, held": {"pruned_gradient_decay": 0.02, "mask": True},
    "masked, held": {"pruned_gradient_factor": 0.0, "mask": True},
    "soft": {"soft_threshold_scale": 1.3},
    "fading": {"pruned_gradient_factor": 0.3, "pruned_weight_factor": 0.25},
}


def update_of(kind: str, weight: Tensor, pattern: Pattern, dim: int) -> Update:
    """As it is before a step: faded by another factor than after it."""
    options = dict(KINDS[kind])
    if "mask" in options:
        options["mask"] = like(weight, nm_mask(torch.randn_like(weight), pattern, dim))
    if scale := options.get("soft_threshold_scale"):
        options["soft_threshold_scale"] = torch.tensor(scale, device=weight.device)
    rule = Rule(**options)
    faded = Rule(**{**options, "pruned_weight_factor": 0.3 if rule.pruned_weight_factor else 0.0})
    update = Update(weight, weight, dim, pattern, faded)
    return update._replace(projected=projection(weight, update), rule=rule)


def faded(update: Update, factor: float) -> Update:
    """The same with another factor of pruned weights."""
    return update._replace(rule=replace(update.rule, pruned_weight_factor=factor))


def pruned(weight: Tensor, update: Update) -> Tensor:
    mask = update.rule.mask
    if mask is None:
        mask = reference.nm_mask(weight, update.pattern, update.dim)
    return ~like(weight, mask)


def like(weight: Tensor, other: Tensor) -> Tensor:
    """The same numbers in the weight's order of memory."""
    return torch.empty_like(weight, dtype=other.dtype).copy_(other)


def projection(weight: Tensor, update: Update) -> Tensor:
    """The projection, by the functions for users."""
    rule = update.rule
    if rule.soft_threshold_scale is not None:
        shrunk = reference.soft_threshold(weight, update.pattern, update.dim)
        return shrunk * rule.soft_threshold_scale
    if rule.mask is not None:
        return weight * rule.mask
    fading = weight * rule.pruned_weight_factor
    return torch.where(pruned(weight, update), fading, weight) + 0.0


def edited(grad: Tensor, weight: Tensor, update: Update) -> Tensor:
    """The gradient that Adam sees."""
    rule = update.rule
    changed = rule.pruned_gradient_factor * grad + rule.pruned_gradient_decay * weight
    return torch.where(pruned(weight, update), changed, grad)
