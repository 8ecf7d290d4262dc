"""ASP: train dense, prune once by magnitude, train on with the mask fixed (Mishra et al. 2021, arXiv 2104.08378; NVIDIA apex).

Apex prunes a trained network and repeats the whole training. Here one run holds both: the first ``prune_at`` of the steps are dense, the
rest repeat training with the fixed mask, so that all recipes get the same number of steps (the learning-rate schedule is
not restarted and the optimizer keeps its state; ``prune_at=0`` prunes at once, for a model that comes trained).
When to use: fine-tuning a trained network. Cost: one mask byte a weight, one pass for the masked copy, one for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.permutation.permute import follow, permute_inputs
from nmrun.recipes.base import Recipe
from nmrun.recipes.held import mask_gradients
from nmrun.sparsity.weight import Projection, SparseWeight


class ASP(Recipe):
    """``prune_at``: the fraction of all steps that is trained densely first, 0 to below 1 (default one half). ``permute``: before
    pruning, order channels so that the masks keep more (:mod:`nmrun.permutation.permute`); a copy of the model (EMA) is then made after it.
    """

    name: ClassVar[str] = "asp"
    gradient_is_masked = chooses_largest = True

    def __init__(self, pattern: Pattern, total_steps: int | None = None, *, prune_at: float = 0.5, permute: bool = False) -> None:  # fmt: skip
        super().__init__(pattern, total_steps)
        if not 0 <= prune_at < 1:
            raise ValueError(f"asp: prune_at={prune_at} must be a fraction of all steps, 0 <= prune_at < 1")
        if prune_at > 0 and total_steps is None:
            raise ValueError("asp needs total_steps to know when to prune; prune_at=0 prunes at once")
        self.prune_step = self.dense_steps = round(prune_at * (total_steps or 0))
        self.permute, self.by_rows = permute, not permute

    def prepare(self, model: nn.Module) -> None:
        self.tied = follow(model, self.events) if self.permute else {}

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.originals = {weight.name: weight.projection for weight in weights}
        for weight in weights:
            weight.projection.register_buffer("mask", torch.ones_like(weight.dense, dtype=torch.bool))
        self.dense_forward = True
        self.after_step(weights, optimizer)  # with prune_at=0 it is time

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        if self.dense_forward:  # asked for ahead of the pruning, by finalize for example
            return super().project(projection, dense, out)
        mask, original = projection.get_buffer("mask"), self.originals[projection.name]
        if projection is not original:  # a copy of the model (EMA), made before the pruning perhaps
            if self.tied and not torch.equal(mask, original.get_buffer("mask")):
                raise RuntimeError("asp: this copy of the model is from before its channels were permuted: make a new one")
            mask.copy_(original.get_buffer("mask"))
        torch.mul(dense, mask, out=out)

    def around(self, projection: Projection) -> Around | None:
        return None if self.dense_forward else Around(projection.pattern, spared=0.0, mask=projection.get_buffer("mask"))

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if not self.dense_forward:
            mask_gradients(weights)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step == self.prune_step:
            self._prune(weights, optimizer)

    @torch.no_grad()
    def _prune(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.events += [f"step {self.step}: {s}" for s in permute_inputs(weights, self.tied, optimizer, self.followers)]
        for weight in weights:
            mask = weight.projection.get_buffer("mask").copy_(self.choose(weight.projection, weight.dense))
            weight.dense.masked_fill_(~mask, 0.0)
        self.dense_forward = False
        self.events.append(f"step {self.step}: ASP pruned once by magnitude to {self.pattern}; the mask is fixed from here on")
