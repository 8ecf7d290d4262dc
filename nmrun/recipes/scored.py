"""What LBC and MaskLLM share: a score for every possible mask of every group, which the optimizer moves like any parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity.candidates import by_group, candidates, from_groups, too_many
from nmrun.sparsity.weight import Projection, SparseWeight


class ScoredMasks(Recipe):
    """Scores are the parameter ``scores`` of each projection, (groups, C) with C = (M over N), in a parameter group of their own."""

    seed = 0  # of what is drawn at random, itself drawn when the run begins

    def refuses(self, shape: Sequence[int], dim: int, pattern: Pattern) -> str:
        return too_many(pattern)

    def score(
        self,
        weights: Sequence[SparseWeight],
        optimizer: torch.optim.Optimizer,
        first: Callable[[SparseWeight, tuple[int, ...]], Tensor],
        **options: Any,
    ) -> None:
        """Give every weight its scores, at first ``first(weight, shape)``; ``options`` are those of their parameter group."""
        self.seed = int(torch.randint(2**31, ()))
        for weight in weights:
            groups = by_group(weight.dense, weight.pattern, weight.dim).shape[:-1]
            scores = first(weight, (*groups, len(candidates(weight.pattern, weight.dense))))
            weight.projection.register_parameter("scores", nn.Parameter(scores))
        optimizer.add_param_group({"params": [weight.projection.get_parameter("scores") for weight in weights], **options})

    @staticmethod
    def scores(weight: SparseWeight) -> Tensor:
        return weight.projection.get_parameter("scores")

    @staticmethod
    def mask(projection: Projection, rows: Tensor, shape: torch.Size) -> Tensor:
        """The mask of a weight of this shape from one row of M for each group."""
        return from_groups(rows, shape, projection.dim)

    def keep_best(self, projection: Projection, dense: Tensor, out: Tensor, scores: Tensor) -> None:
        """Write the weight under the candidates with the highest scores."""
        best = candidates(projection.pattern, dense)[scores.argmax(-1)]
        torch.mul(dense, self.mask(projection, best, dense.shape), out=out)

    @staticmethod
    def of_candidates(weight: SparseWeight, of_weights: Tensor) -> Tensor:
        """For every candidate the sum of a quantity over the weights that it keeps, (groups, C)."""
        members = by_group(of_weights, weight.pattern, weight.dim)
        return members @ candidates(weight.pattern, members).T

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seed = int(state["seed"])
