"""ProxSparse: learn masks by a regulariser that is 0 for N:M weights (Liu et al. 2025, arXiv
2502.00258, ICML 2025).

Proximal gradient descent: after every optimizer step a weight w becomes the minimiser of
``1/2 ||u - w||^2 + strength * R(u)``, where R sums the products of N + 1 magnitudes of a group
(:mod:`nmrun.sparsity.proximal`). The forward pass uses the dense weights on the way, which R draws to
N:M groups. In the end the masks alone count: the N largest of the moved weights are kept, with the
values that all weights had before. The paper's other regulariser, which draws weights to those
values, is not here. What is not sparse stays as it was; the authors' code moves it and takes the old
values in the end. When to use: a trained network and little data. Cost: a copy of the weights, and an
iteration over every group after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.ranges import FRACTION, log, number
from nmrun.recipes.parameters import FrozenWeights, check_groups
from nmrun.recipes.periodic import keep_mask
from nmrun.rule import Rule
from nmrun.sparsity.proximal import MOST, proximal
from nmrun.sparsity.weight import SparseWeight


@dataclass
class ProxSparse(FrozenWeights):
    """Masks by proximal steps; the weights stay those of before.

    Args:
        strength: the paper's lambda; its scripts have 0.2 to 25, by network.
        dense: fraction of all steps trained first; 0 for a model that comes trained.
    """

    name: ClassVar[str] = "proxsparse"
    needs_total_steps: ClassVar[str] = "the masks are taken at its end"

    strength: Annotated[float, number(0, open_low=True), log(0.01, 30.0)] = 0.25
    dense: Annotated[float, FRACTION] = 0.5

    def refuses(self, shape: Sequence[int], outputs: int, pattern: Pattern) -> str:
        return "" if pattern.m <= MOST else f"proximal steps are for groups of {MOST} at most"

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        check_groups(optimizer, self.name)
        self.after_step(weights, optimizer)  # with dense=0 it is time

    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        if self.evaluates_final:
            self.freeze(optimizer, but=[weight.parameter for weight in weights])

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.check_frozen(optimizer)
        if not self.dense_forward and self.step <= self.ends:
            for weight in weights:
                near = proximal(weight.dense, weight.pattern, weight.dim, self.strength)
                weight.dense.copy_(near)
        if self.step == self.begins:
            for weight in weights:
                weight["original"] = weight.dense.clone()
            self.dense_forward = False
            self.say("ProxSparse begins to draw the weights to the pattern")
        if self.step == self.ends:
            for weight in weights:
                keep_mask(weight, self.largest_mask(weight))
                weight.dense.copy_(weight["original"])

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(mask=weight["mask"], pruned_gradient_factor=0.0) if self.is_sparse else Rule()

    def project(self, weight: SparseWeight, out: Tensor) -> None:
        if self.is_sparse:
            super().project(weight, out)
        else:
            out.copy_(weight.dense)

    def project_final(self, weight: SparseWeight, out: Tensor) -> None:
        if self.evaluates_final:
            torch.mul(weight["original"], self.largest_mask(weight), out=out)
        else:
            super().project_final(weight, out)

    def would_keep(self, weight: SparseWeight, out: Tensor) -> None:
        self.project_final(weight, out)
