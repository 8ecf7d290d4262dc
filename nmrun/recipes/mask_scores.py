"""What LBC and MaskLLM share: a score for every possible mask of a group, which the optimizer
moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.patterns import Pattern
from nmrun.recipes.own_parameters import OwnParameters
from nmrun.sparsity.candidates import by_group, candidates, from_groups, too_many
from nmrun.sparsity.weight import SparseWeight


@dataclass
class MaskScores(OwnParameters):
    """Scores are parameters (groups, C), C = (M over N)."""

    def refuses(self, shape: Sequence[int], outputs: int, pattern: Pattern) -> str:
        return too_many(pattern)

    def score(
        self,
        weights: Sequence[SparseWeight],
        optimizer: torch.optim.Optimizer,
        first: Callable[[SparseWeight, tuple[int, ...]], Tensor],
        **options: Any,
    ) -> None:
        """Give every weight its scores.

        Args:
            weights: all sparse weights.
            optimizer: gets a parameter group with the scores.
            first: ``first(weight, shape)`` makes a weight's first scores.
            options: those of the parameter group.
        """

        def made(weight: SparseWeight) -> dict[str, Tensor]:
            groups = by_group(weight.dense, weight.pattern, weight.dim).shape[:-1]
            count = len(candidates(weight.pattern, weight.dense))
            return {"scores": first(weight, (*groups, count))}

        self.own(weights, optimizer, made, **options)

    def scores(self, weight: SparseWeight) -> nn.Parameter:
        """The scores of a weight's masks."""
        return self.parameter(weight, "scores")

    @staticmethod
    def mask(weight: SparseWeight, rows: Tensor) -> Tensor:
        """The mask of a weight from one row of M for each group."""
        return from_groups(rows, weight.dense.shape, weight.dim)

    def keep(self, weight: SparseWeight, out: Tensor, chosen: Tensor) -> None:
        """Write the weight under one candidate for each group, by its number."""
        rows = candidates(weight.pattern, weight.dense)[chosen]
        torch.mul(weight.dense, self.mask(weight, rows), out=out)

    @staticmethod
    def of_candidates(weight: SparseWeight, of_weights: Tensor) -> Tensor:
        """For every candidate the sum of a quantity over the weights it keeps, (groups, C)."""
        members = by_group(of_weights, weight.pattern, weight.dim)
        return members @ candidates(weight.pattern, members).T

    def would_keep(self, weight: SparseWeight, out: Tensor) -> None:
        self.project_final(weight, out)
