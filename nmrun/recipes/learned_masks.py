"""What MaskLLM and ProxSparse share: dense training first, then masks alone are learned, until the
last step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe


class LearnedMasks(Recipe):
    """The forward pass is N:M from the last step on, and dense in the fraction ``dense`` of the
    steps; between the two a final weight is what the masks would leave now.
    """

    dense: float

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        assert total_steps is not None
        self.begins, self.ends = round(self.dense * total_steps), total_steps
        self.dense_forward, self.dense_steps = True, total_steps

    @property
    def is_sparse(self) -> bool:
        return self.step >= self.ends

    @property
    def evaluates_final(self) -> bool:
        return not self.dense_forward and not self.is_sparse

    @staticmethod
    def freeze(optimizer: torch.optim.Optimizer, but: Iterable[nn.Parameter] = ()) -> None:
        """Take all gradients away, so that the optimizer passes over the parameters.

        Args:
            optimizer: of the parameters.
            but: those that keep theirs.
        """
        moved = {id(parameter) for parameter in but}
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            if id(parameter) not in moved:
                parameter.grad = None
