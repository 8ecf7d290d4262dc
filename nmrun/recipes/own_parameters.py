"""Parameters of a recipe's own beside the network's: scores of masks, adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.recipes.base import Recipe
from nmrun.sparsity.weight import SparseWeight


class OwnParameters(Recipe):
    """They have a parameter group of their own, so the optimizer moves them by the gradients that
    the recipe computes.

    Their values are kept with the weights' tensors too, in the same memory, so that they are saved
    with the optimizer.
    """

    @property
    def looks_across_rows(self) -> bool:
        return True  # they are no part of the model, whose parameters are sharded

    def own(
        self,
        weights: Sequence[SparseWeight],
        optimizer: torch.optim.Optimizer,
        first: Callable[[SparseWeight], Mapping[str, Tensor]],
        **options: Any,
    ) -> None:
        """Give every weight its parameters.

        Args:
            weights: all sparse weights.
            optimizer: gets a parameter group with them.
            first: ``first(weight)`` makes their first values, by name.
            options: those of the parameter group.
        """
        self.parameters: dict[tuple[str, str], nn.Parameter] = {}
        for weight in weights:
            for key, value in first(weight).items():
                parameter = nn.Parameter(value)
                self.parameters[weight.name, key] = parameter
                weight[key] = parameter.detach()
        optimizer.add_param_group({"params": list(self.parameters.values()), **options})

    def parameter(self, weight: SparseWeight, key: str) -> nn.Parameter:
        """A parameter of a weight; saved values that were loaded count."""
        parameter = self.parameters[weight.name, key]
        if weight[key].data_ptr() != parameter.data_ptr():
            parameter.data.copy_(weight[key])
            weight[key] = parameter.detach()
        return parameter

    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        named = {weight.name: weight for weight in weights}
        for name, key in self.parameters:
            self.parameter(named[name], key)
