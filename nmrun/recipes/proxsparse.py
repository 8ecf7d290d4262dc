"""ProxSparse: learn masks by a regulariser that is 0 for N:M weights (Liu et al. 2025, arXiv
2502.00258, ICML 2025).

Proximal gradient descent: after every optimizer step a weight w becomes the minimiser of ``1/2 ||u
- w||^2 + strength * R(u)``. The regulariser R of a group is the sum over all choices of N + 1 of
its weights of the product of their magnitudes: 0 exactly for groups with at most N non-zeros. The
paper has 2:4, where it is ``|abc| + |abd| + |acd| + |bcd|``. The forward pass uses the dense
weights on the way, which R draws to N:M groups. In the end the N largest of the moved weights are
kept, with the values that all weights had before. What is not sparse stays as it was; the authors'
code moves it and takes the old values in the end. Not here: the paper's other regulariser, which
draws weights to those values.

Cost: a copy of the weights, and an iteration over every group after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.ranges import FRACTION, log, number
from nmrun.recipes.base import keep_mask
from nmrun.recipes.parameters import FrozenWeights, check_optimizer
from nmrun.rule import Rule
from nmrun.sparsity.reference import by_group, from_groups
from nmrun.sparsity.weight import SparseWeight

LARGEST_GROUP = 8  # members of a group: (M - N) descents of up to 100 sweeps over M weights
SWEEPS = 100  # the authors' limit, rarely needed


@dataclass
class ProxSparse(FrozenWeights):
    """Masks by a regulariser that draws weights to N:M; they get their old values back.

    When to use: a trained network whose weights should stay, and little data. SparseGPT was
    better at 2:4, 4:8 and 1:4.

    Args:
        strength: the weight of the regulariser, the paper's lambda; its scripts have 0.2 to 25, by network.
        dense: fraction of all steps trained first; 0 for a model that comes trained.
    """

    name: ClassVar[str] = "proxsparse"
    title: ClassVar[str] = "ProxSparse"
    needs_total_steps: ClassVar[str] = "the masks are taken at its end"

    strength: Annotated[float, number(0, open_low=True), log(0.01, 30.0)] = 0.25
    dense: Annotated[float, FRACTION] = 0.5

    def refuses(self, shape: Sequence[int], outputs: int, pattern: Pattern) -> str:
        return (
            ""
            if pattern.m <= LARGEST_GROUP
            else f"proximal steps are for groups of {LARGEST_GROUP} at most"
        )

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, self.name)
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
            self.say("ProxSparse begins to draw the weights to the pattern", "phase")
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
        elif self.is_sparse and self.step == self.ends:  # of an average: the old values as before
            torch.mul(weight["original"], weight["mask"], out=out)
        else:
            super().project_final(weight, out)


@torch.no_grad()
def proximal(weight: Tensor, pattern: Pattern, dim: int, strength: float) -> Tensor:
    """Find the w that minimises ``1/2 ||w - weight||^2 + strength * R(w)`` in every group of M, 8
    at most. Algorithm 3 of the paper (EnumALM): a minimiser has the signs and the order of
    ``weight`` and k non-zeros, N to M of them. For each k the k largest magnitudes are moved in
    turn to their best values, and the best k counts."""
    groups = by_group(weight, pattern, dim)
    ordered, places = groups.abs().sort(-1, descending=True)
    magnitudes = ordered.flatten(0, -2).T.contiguous()  # (M, groups): a product reads whole rows
    best = magnitudes.clone()
    best[pattern.n :] = 0
    lowest = magnitudes[pattern.n :].square().sum(0) / 2
    for k in range(pattern.n + 1, pattern.m + 1):
        moved_to = _descend(magnitudes, k, pattern.n, strength)
        value = (moved_to - magnitudes).square().sum(0) / 2 + strength * _products(
            moved_to, pattern.n + 1
        )
        better = value < lowest
        best, lowest = torch.where(better, moved_to, best), torch.where(better, value, lowest)
    moved = torch.zeros_like(ordered).scatter_(-1, places, best.T.view(places.shape))
    return from_groups(moved * groups.sign(), weight.shape, dim)


def _descend(magnitudes: Tensor, k: int, n: int, strength: float) -> Tensor:
    """The k largest magnitudes (M, groups), each moved to its minimiser given the others, in turn,
    until none of its group moves; the others 0."""
    minimiser = torch.zeros_like(magnitudes)
    active = torch.arange(magnitudes.shape[1], device=magnitudes.device)  # groups that still move
    targets, now = magnitudes[:k], minimiser[:k]
    for _ in range(SWEEPS):
        before, now = now, now.clone()
        # the products of the members in front of i, as they were, and of those behind, as they are
        front = [_none(now, n)]
        for i in range(k - 1):
            front.append(_with(front[-1], before[i]))
        behind = _none(now, n)
        for i in reversed(range(k)):
            others = (front[i] * behind.flip(0)).sum(0)
            now[i] = (targets[i] - strength * others).clamp_min(0)
            behind = _with(behind, now[i])
        moves = ((now - before).abs() > 1e-6 * before).any(0)
        minimiser[:k, active] = now
        active, targets, now = active[moves], targets[:, moves], now[:, moves]
        if not len(active):
            break
    return minimiser


def _products(members: Tensor, count: int) -> Tensor:
    """The sum over all choices of ``count`` of the members (rows) of their product."""
    products = _none(members, count)
    for member in members:
        products = _with(products, member)
    return products[count]


def _none(like: Tensor, most: int) -> Tensor:
    """Products of 0, 1, ... ``most`` members where there are no members: 1, 0, ... 0."""
    products = like.new_zeros(most + 1, like.shape[1])
    products[0] = 1
    return products


def _with(products: Tensor, member: Tensor) -> Tensor:
    """The sums of products of 0, 1, ... members with one member more."""
    return torch.cat([products[:1], products[1:] + products[:-1] * member])
