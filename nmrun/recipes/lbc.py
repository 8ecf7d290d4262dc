"""LBC, learning the best combination (Zhang et al. 2022, arXiv 2206.06662): every possible mask of a group has a score; the worst go.

A group starts with all C = (M over N) candidates, hence dense; the forward mask is the union of those left. Score k receives the gradient
``sum over its members of g * w``, the weights receive ``m * g``. Between the fractions ``t_i`` and ``t_f`` of the run the number of
candidates falls from C to 1, by the cube of the time left; from then on the mask is fixed. The scores are parameters of the optimizer,
in a parameter group of their own with its defaults. When to use: small patterns, since C / M scores a weight are stored (1.5 at 2:4,
1 at 1:M). Cost: one matrix product of (weights / M, M) by (M, C) a step until ``t_f``, then a fixed mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.recipes.held import HeldMask, mask_gradients
from nmrun.recipes.scored import ScoredMasks
from nmrun.sparsity.candidates import candidates
from nmrun.sparsity.weight import Projection, SparseWeight


class LBC(ScoredMasks, HeldMask):
    """``t_i``, ``t_f``: fractions of all steps between which candidates are dropped (0 and 0.5)."""

    name: ClassVar[str] = "lbc"
    gradient_is_masked = True

    def __init__(self, pattern: Pattern, total_steps: int | None = None, *, t_i: float = 0.0, t_f: float = 0.5) -> None:
        super().__init__(pattern, total_steps, interval=1)
        if total_steps is None:
            raise ValueError("lbc needs total_steps: it drops candidates between fractions of the run")
        if not 0 <= t_i < t_f < 1:
            raise ValueError(f"lbc: t_i={t_i} and t_f={t_f} must be fractions of all steps with 0 <= t_i < t_f < 1")
        self.begins, self.ends = round(t_i * total_steps), min(total_steps - 1, max(1, round(t_f * total_steps)))
        self.dense_steps = self.ends

    def left(self, pattern: Pattern) -> int:
        """How many candidates a group has at this step."""
        time_left = (self.ends - self.step) / max(1, self.ends - self.begins)
        return 1 + math.ceil((math.comb(pattern.m, pattern.n) - 1) * min(1.0, max(0.0, time_left)) ** 3)

    @property
    def is_sparse(self) -> bool:
        return self.step >= self.ends

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        def first(weight: SparseWeight, shape: tuple[int, ...]) -> Tensor:  # each member of a group starts with a total of 1
            weight.projection.register_buffer("alive", torch.ones(shape, dtype=torch.bool, device=weight.dense.device))
            return weight.dense.detach().new_full(shape, 1 / math.comb(weight.pattern.m - 1, weight.pattern.n - 1))

        self.weights = weights
        self.score(weights, optimizer, first)
        HeldMask.attach(self, weights, optimizer)

    def choose(self, projection: Projection, dense: Tensor) -> Tensor:
        alive = projection.get_buffer("alive").to(dense.dtype)
        return self.mask(projection, alive @ candidates(projection.pattern, dense) > 0, dense.shape)

    def final(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        scores = projection.get_parameter("scores").masked_fill(~projection.get_buffer("alive"), -math.inf)
        self.keep_best(projection, dense, out, scores)

    def around(self, projection: Projection) -> Around:
        return Around(projection.pattern, spared=0.0, mask=projection.get_buffer("mask"))

    @torch.no_grad()
    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        # of all weights, also where the step masks; scores of dropped candidates go on too, and nobody looks at them
        for weight in self.weights:
            if not self.is_sparse and weight.dense.grad is not None:
                self.scores(weight).grad = self.of_candidates(weight, weight.dense.grad * weight.dense)
        mask_gradients(weights)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            alive, left = weight.projection.get_buffer("alive"), self.left(weight.pattern)
            if left < int(alive[(0,) * (alive.dim() - 1)].sum()):
                scores = self.scores(weight).masked_fill(~alive, -math.inf)
                alive.zero_().scatter_(-1, scores.topk(left, dim=-1).indices, True)
                weight.projection.get_buffer("mask").copy_(self.choose(weight.projection, weight.dense))
        if self.step == self.ends:
            self.events.append(f"step {self.step}: LBC has one candidate left in every group; the mask is fixed from here on")

    def metrics(self) -> dict[str, float]:
        return {"lbc/candidates": float(self.left(self.pattern))}
