"""STE: the hard N:M mask with the plain straight-through estimator, chosen anew at every step.

Forward ``m * w`` with m the N largest magnitudes of M; the gradient reaches every dense weight,
also the pruned ones, unchanged (Bengio et al. 2013; the baseline of Zhou et al. 2021, arXiv
2102.04010). When to use: as the reference for what SR-STE's decay or STEP's frozen preconditioner
adds. Cost: one projection a step, one dense copy of the sparse weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nmrun.recipes.base import Recipe


@dataclass
class STE(Recipe):
    """The hard mask, anew at every step; no hyperparameters."""

    name: ClassVar[str] = "ste"
    masks_are_largest: ClassVar[bool] = True
