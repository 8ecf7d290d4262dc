"""A mask that is chosen now and then and held in between, in a saved buffer of each projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity.weight import Projection, SparseWeight


class HeldMask(Recipe):
    """Forward ``m * w`` with m chosen by :meth:`choose` at the start and after every ``interval`` optimizer steps."""

    def __init__(self, pattern: Pattern, total_steps: int | None, interval: int) -> None:
        super().__init__(pattern, total_steps)
        if interval < 1:
            raise ValueError(f"{self.name}: interval={interval} must be 1 step or more")
        self.interval = interval

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.originals = {weight.name: weight.projection for weight in weights}
        for weight in weights:
            mask = torch.empty_like(weight.dense, dtype=torch.bool, requires_grad=False)  # in memory as the weight
            weight.projection.register_buffer("mask", mask.copy_(self.choose(weight.projection, weight.dense.detach())))

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        mask, original = projection.get_buffer("mask"), self.originals[projection.name]
        if projection is not original:  # a copy of the model (EMA) keeps the mask of what it averages
            mask.copy_(original.get_buffer("mask"))
        torch.mul(dense, mask, out=out)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step % self.interval == 0:
            for weight in weights:
                weight.projection.get_buffer("mask").copy_(self.choose(weight.projection, weight.dense))


@torch.no_grad()
def mask_gradients(weights: Sequence[SparseWeight]) -> None:
    """``grad *= m``, with the held mask: pruned weights receive nothing."""
    for weight in weights:
        if weight.dense.grad is not None:
            weight.dense.grad.mul_(weight.projection.get_buffer("mask"))  # on a CPU four times faster than masked_fill_
