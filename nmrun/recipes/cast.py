"""CAST: dense weights that a growing L1 decay draws to N:M (Huang et al. 2025, arXiv 2509.25996).

The forward pass is dense until the last step: ``w * s``, with learnable scales s (equations 11 and 12):
parameters (outputs, parts) that begin as ones. Groups of M stay whole; the positions of a convolution's
kernel share them. The mask is chosen anew every ``interval`` steps. AdamS (algorithm 1) moves
the other weights less and less by their gradients, more and more towards zero. With Adam's first
moment m1, a = (t - 1) / T at step t, and the step of :class:`nmrun.recipes.ast.AdamDecay`::

    u = (1 - a) * m1 + a * decay * sign(w)   for pruned weights,   m1 for kept ones

In the end pruned weights become 0 and ``w * s`` is the weight. The paper's teacher is
``trainer.distill``.

Cost: a mask byte a weight; some fifteen passes over the sparse weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from nmrun.patterns import Pattern
from nmrun.ranges import log, number, whole
from nmrun.recipes.ast import AdamDecay
from nmrun.recipes.parameters import AddedParameters
from nmrun.sparsity.weight import SparseWeight


@dataclass
class CAST(AddedParameters, AdamDecay):
    """A growing L1 decay that draws a trained network's weights to N:M.

    When to use: retraining a trained language model from its dense weights, with a dense
    teacher.

    Args:
        decay: the decay of pruned weights, the paper's lambda: 4e-7 for Llama-2 7B there. It is of the order
            of the gradients.
        interval: optimizer steps that a mask stays.
        parts: into how many spans the inputs of an output are cut; each has a learned scale.
    """

    name: ClassVar[str] = "cast"
    title: ClassVar[str] = "CAST"
    needs_total_steps: ClassVar[str] = "its decay grows until the end of the run"

    decay: Annotated[float, number(0), log(1e-8, 1e-2)] = 4e-7
    interval: Annotated[int, whole(1)] = 10
    parts: Annotated[int, whole(1)] = 2

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        assert total_steps is not None
        self.dense_steps = total_steps

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        super().attach(weights, optimizer)

        def ones(weight: SparseWeight) -> dict[str, Tensor]:
            return {"scales": weight.dense.new_ones(weight.dense.shape[weight.outputs], self.parts)}

        self.add(weights, optimizer, ones, weight_decay=0.0)

    def _part(self, weight: SparseWeight) -> Tensor:
        inputs, m = weight.dense.shape[weight.dim], weight.pattern.m
        group = torch.arange(inputs, device=weight.dense.device) // m
        return group * self.parts // -(-inputs // m)

    def scale(self, weight: SparseWeight) -> Tensor:
        """The scale of every entry, of a shape that broadcasts to the weight's."""
        scales = self.parameter(weight, "scales").detach()[:, self._part(weight)]
        others = (1,) * (weight.dense.dim() - 2)
        return scales.reshape(*scales.shape, *others).movedim((0, 1), (weight.outputs, weight.dim))

    def chain(self, weight: SparseWeight, gradient: Tensor) -> None:
        """From ``gradient`` at ``scale * w`` make that of the scales, and in place that of w."""
        sides = (weight.outputs, weight.dim)
        of_entries = (gradient * weight.dense).movedim(sides, (0, 1))
        of_inputs = of_entries.reshape(*of_entries.shape[:2], -1).sum(2)
        members = one_hot(self._part(weight), self.parts).to(of_inputs.dtype)
        self.parameter(weight, "scales").grad = of_inputs @ members
        gradient.mul_(self.scale(weight))

    @property
    def is_sparse(self) -> bool:
        return self.step >= self.dense_steps

    @property
    def evaluates_final(self) -> bool:
        return not self.is_sparse

    def update(self, weight: SparseWeight, m1: Tensor) -> Tensor:
        rise = min(1.0, self.step / self.dense_steps)  # the paper's alpha
        shrinkage = (1 - rise) * m1 + rise * self.decay * weight.dense.sign()
        return torch.where(weight["mask"], m1, shrinkage)

    @torch.no_grad()
    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        self.join(optimizer)
        for weight in weights:
            if weight.grad is not None:
                self.chain(weight, weight.grad)
        super().before_step(weights, optimizer)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.part(optimizer)
        if self.step % self.interval == 0 or self.step == self.dense_steps:
            self.renew(weights)

    def project(self, weight: SparseWeight, out: Tensor) -> None:
        torch.mul(weight.dense, self.scale(weight), out=out)
        if self.is_sparse:
            out.mul_(weight["mask"])

    def project_final(self, weight: SparseWeight, out: Tensor) -> None:
        self.project(weight, out)
        if not self.is_sparse:
            out.mul_(self.largest_mask(weight))
