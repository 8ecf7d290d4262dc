"""A mask that is chosen now and then and stays in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from nmrun.ranges import whole
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
