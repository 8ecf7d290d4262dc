"""STE: the hard N:M mask with the plain straight-through estimator, masks chosen anew at every step.

Forward ``m * w`` with m the N largest magnitudes of M; the gradient reaches every dense weight, also the pruned ones, unchanged
(Bengio et al. 2013; the baseline of Zhou et al. 2021, arXiv 2102.04010). When to use: as the reference for what SR-STE's decay or
STEP's frozen preconditioner adds. Cost: one projection a step, one working copy of the sparse weights.

Two options make it the row-wise N:M training of reinforcement learning (RNM-TD3, Vrce et al. 2026, arXiv 2602.14578): masks that stay
for ``interval`` steps, and a gradient for the kept weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.recipes.held import HeldMask, mask_gradients
from nmrun.sparsity.weight import Projection, SparseWeight

GRADIENTS = ("ste", "masked")


class STE(HeldMask):
    """``interval``: optimizer steps that a mask stays (default 1). ``gradient``: ``"ste"``, or ``"masked"`` for the kept weights alone."""

    name: ClassVar[str] = "ste"
    by_rows = chooses_largest = True

    def __init__(self, pattern: Pattern, total_steps: int | None = None, *, interval: int = 1, gradient: str = "ste") -> None:
        super().__init__(pattern, total_steps, interval)
        if gradient not in GRADIENTS:
            raise ValueError(f"ste: gradient={gradient!r}; allowed are {', '.join(GRADIENTS)}")
        self.gradient, self.gradient_is_masked = gradient, gradient == "masked"
        self.plain = interval == 1 and gradient == "ste"  # needs no buffer: the mask is in the projection

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if not self.plain:
            super().attach(weights, optimizer)

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        if self.plain:
            Recipe.project(self, projection, dense, out)
        else:
            super().project(projection, dense, out)

    @property
    def keeps_largest(self) -> bool:
        return self.plain and type(self) is STE and not self.transposable

    def around(self, projection: Projection) -> Around | None:
        if self.plain:
            return self.around_largest(projection.pattern)
        return Around(projection.pattern, spared=0.0 if self.gradient == "masked" else 1.0, mask=projection.get_buffer("mask"))

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.gradient == "masked":
            mask_gradients(weights)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if not self.plain:
            super().after_step(weights, optimizer)
