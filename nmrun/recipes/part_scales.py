"""Learnable scales beside the weights, one for each output and each of some spans of its inputs.

CAST's weight scaling (Huang et al. 2025, arXiv 2509.25996, equations 11 and 12).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from nmrun.recipes.own_parameters import OwnParameters
from nmrun.sparsity.weight import SparseWeight


class PartScales(OwnParameters):
    """Scales are parameters (outputs, parts) that begin as ones. Groups of M stay whole; the
    positions of a convolution's kernel share them."""

    parts: int

    def scale_outputs(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        """Give every weight its scales, which no weight decay acts on."""

        def ones(weight: SparseWeight) -> dict[str, Tensor]:
            return {"scales": weight.dense.new_ones(weight.dense.shape[weight.outputs], self.parts)}

        self.own(weights, optimizer, ones, weight_decay=0.0)

    def scale(self, weight: SparseWeight) -> Tensor:
        """The scale of every entry, of a shape that broadcasts to the weight's."""
        scales = self.parameter(weight, "scales").detach()[:, self._part(weight)]
        others = (1,) * (weight.dense.dim() - 2)
        return scales.reshape(*scales.shape, *others).movedim((0, 1), (weight.outputs, weight.dim))

    def merge_scales(self, weight: SparseWeight) -> None:
        """Multiply the dense weight by its scales, which become ones."""
        weight.dense.mul_(self.scale(weight))
        self.parameter(weight, "scales").data.fill_(1)

    def chain(self, weight: SparseWeight, gradient: Tensor) -> None:
        """From the gradient at ``scale * w`` make those of the scales and of w.

        Args:
            weight: its scales get their gradient.
            gradient: of the weight's shape; becomes that of w, in place.
        """
        sides = (weight.outputs, weight.dim)
        of_entries = (gradient * weight.dense).movedim(sides, (0, 1))
        of_inputs = of_entries.reshape(*of_entries.shape[:2], -1).sum(2)
        members = one_hot(self._part(weight), self.parts).to(of_inputs.dtype)
        self.parameter(weight, "scales").grad = of_inputs @ members
        gradient.mul_(self.scale(weight))

    def _part(self, weight: SparseWeight) -> Tensor:
        """Which part each input is in, (inputs,)."""
        inputs, m = weight.dense.shape[weight.dim], weight.pattern.m
        group = torch.arange(inputs, device=weight.dense.device) // m
        return group * self.parts // -(-inputs // m)
