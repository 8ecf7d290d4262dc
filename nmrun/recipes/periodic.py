"""A mask that is chosen now and then and stays in between; and STE with such masks.

The latter is the row-wise N:M training of reinforcement learning (RNM-TD3, Vrce et al. 2026,
arXiv 2602.14578): masks that stay for ``interval`` steps, a gradient for the kept weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.ranges import one_of, whole
from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class PeriodicMask(Recipe):
    """Forward ``m * w``; :meth:`choose` gives m at the start and after every ``interval`` steps."""

    interval: Annotated[int, whole(1)] = 1

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.renew(weights)

    def renew(self, weights: Sequence[SparseWeight]) -> None:
        """Choose the masks anew."""
        for weight in weights:
            keep_mask(weight, self.choose(weight))

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(mask=weight["mask"])

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step % self.interval == 0:
            self.renew(weights)


@torch.no_grad()
def keep_mask(weight: SparseWeight, mask: Tensor) -> None:
    """Keep a mask for a weight, stored as the weight is."""
    if "mask" not in weight:
        weight["mask"] = torch.empty_like(weight.dense, dtype=torch.bool)
    weight["mask"].copy_(mask)


@dataclass
class PeriodicSTE(PeriodicMask):
    """STE with a mask that stays for a while.

    Args:
        interval: optimizer steps that a mask stays.
        gradient: ``"masked"`` for the kept weights alone, or ``"ste"`` for all.
    """

    name: ClassVar[str] = "ste_periodic"
    masks_are_largest: ClassVar[bool] = True

    interval: Annotated[int, whole(1)] = 100
    gradient: Annotated[str, one_of("ste", "masked")] = "masked"

    def rule(self, weight: SparseWeight) -> Rule:
        factor = 0.0 if self.gradient == "masked" else 1.0
        return Rule(mask=weight["mask"], pruned_gradient_factor=factor)
