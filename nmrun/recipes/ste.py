"""STE: the hard N:M mask with the plain straight-through estimator, chosen anew at every step.

Forward ``m * w`` with m the N largest magnitudes of M; the gradient reaches every dense weight,
also the pruned ones, unchanged (Bengio et al. 2013; the baseline of Zhou et al. 2021, arXiv
2102.04010).

Cost: one projection a step, one dense copy of the sparse weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from nmrun.ranges import one_of, whole
from nmrun.recipes.base import Recipe, keep_mask
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class STE(Recipe):
    """The N largest weights of every M, anew at every step; all weights get the gradient.

    When to use: fine-tuning a trained network from 1:4 on, like SR-STE, and as the reference for
    what a decay or a dense start adds. It has nothing to tune but the learning rate.
    """

    name: ClassVar[str] = "ste"
    title: ClassVar[str] = "STE"
    masks_are_largest: ClassVar[bool] = True


@dataclass
class PeriodicMask(Recipe):
    """Forward ``m * w``; :meth:`choose` gives m at the start and after every ``interval`` steps."""

    interval: Annotated[int, whole(1)] = 1

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.renew(weights)

    def renew(self, weights: Sequence[SparseWeight]) -> None:
        for weight in weights:
            keep_mask(weight, self.choose(weight))

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(mask=weight["mask"])

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step % self.interval == 0:
            self.renew(weights)


@dataclass
class PeriodicSTE(PeriodicMask):
    """STE with a mask that stays for some steps.

    When to use: reinforcement learning, as in its paper, and where masks that change at every step
    disturb. One small task was tried, which decides nothing.

    That is the row-wise N:M training of reinforcement learning (RNM-TD3, Vrce et al. 2026, arXiv
    2602.14578): a gradient for the kept weights only.

    Args:
        interval: optimizer steps that a mask stays.
        gradient: ``"masked"`` for the kept weights alone, or ``"ste"`` for all.
    """

    name: ClassVar[str] = "ste_periodic"
    title: ClassVar[str] = "STE, periodic"
    masks_are_largest: ClassVar[bool] = True

    interval: Annotated[int, whole(1)] = 100
    gradient: Annotated[str, one_of("ste", "masked")] = "masked"

    def rule(self, weight: SparseWeight) -> Rule:
        factor = 0.0 if self.gradient == "masked" else 1.0
        return Rule(mask=weight["mask"], pruned_gradient_factor=factor)
