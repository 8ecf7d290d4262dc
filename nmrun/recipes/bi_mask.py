"""Bi-Mask: a second mask makes the input gradient N:M as well (Zhang et al. 2023, arXiv 2302.06058).

Forward and weight gradient are SR-STE's. The input gradient ``dX = dZ W`` sums over the outputs, so there the forward weight is pruned once
more, to N:M along the outputs. Which outputs share a group is free: every ``interval`` steps the best of ``candidates`` random permutations is
taken, the one that loses fewest entries; between, the mask alone follows the weight. 100 and 100 are the paper's; its code draws 10 unless
told otherwise, and counts forward passes. When to use: if the backward pass has to be sparse too. Cost: SR-STE's, and a mask a step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nmrun import kernels
from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.products import simulated
from nmrun.recipes.base import Recipe, decay_pruned, keep_largest
from nmrun.sparsity.weight import Projection, SparseWeight


class BiMask(Recipe):
    """``decay``: SR-STE's lambda. ``interval``: optimizer steps between searches. ``candidates``: permutations drawn in each, from the step
    and the weight's name alone. Grouped convolutions and what ``simulated.install`` leaves alone keep the exact input gradient."""

    name: ClassVar[str] = "bi_mask"
    input_gradient_is_nm = True

    def __init__(
        self, pattern: Pattern, total_steps: int | None = None, *, decay: float = 2e-4, interval: int = 100, candidates: int = 100
    ) -> None:  # fmt: skip
        super().__init__(pattern, total_steps)
        if not (decay >= 0 and interval >= 1 and candidates >= 1):
            raise ValueError(f"bi_mask: {decay=} must be 0 or more, {interval=} and {candidates=} 1 or more")
        self.decay, self.interval, self.candidates = decay, interval, candidates

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        grouped = [w for w in weights if getattr(w.module, "groups", 1) > 1]  # each group has outputs of its own
        exact = [w.name for w in grouped] + simulated.install([w for w in weights if w not in grouped])
        for weight in (w for w in weights if w.name not in exact):
            order = torch.arange(len(_rows(weight.dense, weight.projection)), device=weight.dense.device)
            weight.projection.register_buffer("permutation", order)
            weight.projection.register_buffer("input_weight", torch.zeros_like(weight.dense), persistent=False)
        if exact:
            self.events.append(f"Bi-Mask leaves the input gradient exact at {', '.join(exact)}")
        self._search(weights)

    def follow(self, projection: Projection) -> None:
        if hasattr(projection, "permutation"):
            order, again = projection.get_buffer("permutation"), projection.get_buffer("input_weight")
            outputs = 1 - projection.dim
            if outputs == 0 and kernels.project_rows(projection.projected, again, projection.pattern, order):
                return
            permuted = _rows(projection.projected, projection)[order]
            kept = torch.empty_like(permuted)
            keep_largest(permuted, kept, projection.pattern, 0)
            places = order.argsort()[: again.shape[outputs]]
            torch.index_select(kept.movedim(0, outputs), outputs, places, out=again)

    def around(self, projection: Projection) -> Around:
        return Around(projection.pattern, decay=self.decay)

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        decay_pruned(weights, self.decay)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step % self.interval == 0:
            self._search(weights)

    @torch.no_grad()
    def _search(self, weights: Sequence[SparseWeight]) -> None:
        for projection, used in [(w.projection, w.projected != 0) for w in weights if hasattr(w.projection, "permutation")]:
            order, rows, pattern = projection.get_buffer("permutation"), _rows(used, projection), projection.pattern
            generator = torch.Generator().manual_seed(zlib.crc32(f"{projection.name} {self.step}".encode()))
            drawn = [torch.randperm(len(order), generator=generator).to(order.device) for _ in range(self.candidates)]
            groups = (rows[p].unflatten(0, (-1, pattern.m)) for p in drawn)
            kept = torch.stack([g.sum(1).clamp_max(pattern.n).sum() for g in groups]).tolist()  # any N of the non-zeros
            order.copy_(drawn[kept.index(max(kept))])


def _rows(weight: Tensor, projection: Projection) -> Tensor:
    """The weight with its outputs in front, filled up with zeros to whole groups."""
    rows = weight.detach().movedim(1 - projection.dim, 0)
    return torch.cat([rows, rows.new_zeros(-len(rows) % projection.pattern.m, *rows.shape[1:])])
