"""LBC, learning the best combination: every possible mask of a group has a score; the worst go
(Zhang et al. 2022, arXiv 2206.06662).

A group starts with all C = (M over N) candidates, hence dense; the forward mask is the union of
those left. Score k receives the gradient ``sum over its members of g * w``, the weights receive ``m
* g``. Between the fractions ``t_i`` and ``t_f`` of the run the number of candidates falls from C to
1, by the cube of the time left. From then on the mask is fixed. Of equal scores, as of dead inputs,
those stay that keep more of |w|: the paper leaves it open. The scores are parameters of the
optimizer, with the settings of its first group.

Cost: one matrix product of (weights / M, M) by (M, C) a step until ``t_f``, then a fixed mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.ranges import FRACTION, number
from nmrun.recipes.base import keep_mask
from nmrun.recipes.parameters import MaskScores, candidates
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class LBC(MaskScores):
    """A score for every possible mask of a group; the worst are dropped until one is left.

    When to use: small patterns, since every possible mask of a group has a score (1.5 a weight at
    2:4, 1 at 1:M). It was compared on the digits alone.

    Args:
        t_i: the fraction of all steps at which candidates begin to be dropped.
        t_f: the fraction of all steps at which one candidate is left.
    """

    name: ClassVar[str] = "lbc"
    title: ClassVar[str] = "LBC"
    needs_total_steps: ClassVar[str] = "it drops candidates between fractions of the run"

    t_i: Annotated[float, FRACTION] = 0.0
    t_f: Annotated[float, number(0, 1, open_low=True, open_high=True)] = 0.5

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        assert total_steps is not None
        if self.t_i >= self.t_f:
            raise ConfigError(f"lbc: t_i={self.t_i} must be below t_f={self.t_f}")
        self.begins = round(self.t_i * total_steps)
        self.ends = max(1, min(total_steps - 1, round(self.t_f * total_steps)))
        self.dense_steps = self.ends

    def count(self, pattern: Pattern, step: int) -> int:
        """How many candidates a group has after so many steps."""
        time_left = (self.ends - step) / max(1, self.ends - self.begins)
        dropped_last = math.comb(pattern.m, pattern.n) - 1
        return 1 + math.ceil(dropped_last * min(1.0, max(0.0, time_left)) ** 3)

    @property
    def is_sparse(self) -> bool:
        return self.step >= self.ends

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        def first(weight: SparseWeight, shape: tuple[int, ...]) -> Tensor:
            weight["alive"] = torch.ones(shape, dtype=torch.bool, device=weight.dense.device)
            # each member of a group starts with a total of 1
            of_member = math.comb(weight.pattern.m - 1, weight.pattern.n - 1)
            return weight.dense.new_full(shape, 1 / of_member)

        self.score(weights, optimizer, first)
        for weight in weights:
            keep_mask(weight, self.choose(weight))

    def choose(self, weight: SparseWeight) -> Tensor:
        alive = weight["alive"].to(weight.dense.dtype)
        return self.mask(weight, alive @ candidates(weight.pattern, weight.dense) > 0)

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(mask=weight["mask"], pruned_gradient_factor=0.0)

    def project_final(self, weight: SparseWeight, out: Tensor) -> None:
        self.keep(weight, out, self.best(weight)[..., 0])

    def best(self, weight: SparseWeight) -> Tensor:
        """The numbers of a group's candidates from the best to the worst, (groups, C)."""
        scores = self.scores(weight).detach().masked_fill(~weight["alive"], -math.inf)
        magnitudes = self.of_candidates(weight, weight.dense.abs())
        by_size = magnitudes.argsort(dim=-1, descending=True, stable=True)
        by_score = scores.gather(-1, by_size).argsort(dim=-1, descending=True, stable=True)
        return by_size.gather(-1, by_score)

    @torch.no_grad()
    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        self.join(optimizer)
        # scores of dropped candidates move on too, and nobody looks at them
        for weight in weights:
            scores = self.scores(weight)
            if not self.is_sparse and weight.grad is not None:
                scores.grad = self.of_candidates(weight, weight.grad * weight.dense)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.part(optimizer)
        for weight in weights:
            count = self.count(weight.pattern, self.step)
            if count < self.count(weight.pattern, self.step - 1):
                best = self.best(weight)[..., :count]
                weight["alive"].zero_().scatter_(-1, best, True)
                keep_mask(weight, self.choose(weight))
        if self.step == self.ends:
            self.say(
                "LBC has one candidate left in every group; the mask is fixed from here on", "phase"
            )

    def metrics(self) -> dict[str, float]:
        return {"lbc/candidates": float(self.count(self.pattern, self.step))}
