"""SR-STE: straight-through estimator with a sparse-refined term (Zhou et al. 2021, arXiv 2102.04010, equation 9).

The forward pass uses ``m * w``; the gradient becomes ``g + decay * (1 - m) * w``, which pulls pruned weights to zero and so calms the
mask. The term is added once per optimizer step, to the unscaled and clipped gradient; inside autograd (as in the official
code) it would be added once per micro-batch, divided by the fp16 loss scale and clipped along with the gradient.
When to use: SGD from scratch. Cost: STE's, and one pass over the sparse weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe, decay_pruned
from nmrun.sparsity.weight import Projection, SparseWeight


class SRSTE(Recipe):
    """``decay``: the paper's lambda_w, 2e-4 there and here. Ordinary weight decay acts besides, on all weights."""

    name: ClassVar[str] = "sr_ste"
    by_rows = chooses_largest = True

    def __init__(self, pattern: Pattern, total_steps: int | None = None, *, decay: float = 2e-4) -> None:
        super().__init__(pattern, total_steps)
        if not decay >= 0:
            raise ValueError(f"sr_ste: decay={decay} must be 0 or more")
        self.decay = decay

    def around(self, projection: Projection) -> Around | None:
        return self.around_largest(projection.pattern, self.decay)

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        decay_pruned(weights, self.decay)
