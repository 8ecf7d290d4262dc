"""What a one-shot method is, and the methods: one layer's weight and its inputs in, the pruned weight
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.ranges import FLAG, number
from nmrun.sparsity.masks import nm_mask


@dataclass
class Method:
    """Base of all one-shot methods: a weight and its inputs in, the pruned weight out. The fields of a
    subclass are its hyperparameters."""

    name: ClassVar[str] = ""

    def prune(self, weight: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
        """Prune the weight of one layer.

        Args:
            weight: (outputs, inputs), in float32 or float64.
            gram: ``X^T X``, (inputs, inputs), of the calibration inputs X (tokens, inputs). A weight
                V in place of W has the squared output error ``tr((V - W) X^T X (V - W)^T)``.
            pattern: N:M along the inputs. With a length (:meth:`Pattern.over`), each stretch of so
                many inputs has groups of its own, and its last one may be short. A convolution has
                a stretch for every kernel position.

        Returns:
            A new tensor of the same shape, with +0.0 where it is pruned.
        """
        raise NotImplementedError


@dataclass
class Scored(Method):
    """A method that keeps the N weights of a group with the largest scores, as they are.

    Args:
        permute: before a layer is pruned, order its input channels so that the masks keep more of
            the scores.
    """

    permute: Annotated[bool, FLAG] = False

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        """Score every weight (outputs, inputs), 0 or more. ``norms``: ``||X_j||_2`` of every input
        over all calibration tokens, (inputs,)."""
        raise NotImplementedError

    def prune(self, weight: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
        scores = self.scores(weight, gram.diagonal().sqrt())
        runs = scores.unflatten(1, (-1, pattern.length or scores.shape[1]))
        return torch.where(nm_mask(runs, pattern, dim=2).flatten(1), weight, 0.0)


@dataclass
class Magnitude(Scored):
    """Score ``|W_ij|``."""

    name: ClassVar[str] = "magnitude"

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        return weight.abs()


@dataclass
class Wanda(Scored):
    """Keep the weights with the largest ``|W_ij| * ||X_j||_2``, X_j being all calibration values of
    input j (Sun et al. 2023, arXiv 2306.11695).

    Args:
        permute: order the input channels first, so that the masks keep more of the scores.
    """

    name: ClassVar[str] = "wanda"

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        return weight.abs() * norms


@dataclass
class RIA(Scored):
    """Keep the weights with the largest ``(|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) *
    ||X_j||_2^a``, X_j being all calibration values of input j (Zhang et al. 2024, arXiv
    2402.12419).

    Args:
        permute: order the input channels first, so that the masks keep more of the scores.
        a: how much the activations count; 0.5 in the paper.
    """

    name: ClassVar[str] = "ria"

    a: Annotated[float, number(0)] = 0.5

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        size = weight.abs()
        least = torch.finfo(size.dtype).tiny  # a column or row of zeros has the score 0
        of_column = size / size.sum(0, keepdim=True).clamp_min(least)
        of_row = size / size.sum(1, keepdim=True).clamp_min(least)
        return (of_column + of_row) * norms**self.a


# columns whose updates of all columns to their right are made together; the same up to rounding
BLOCK = 128


@dataclass
class SparseGPT(Method):
    """Prune column by column, and let the columns to the right make up for what is pruned: SparseGPT
    (Frantar & Alistarh 2023, arXiv 2301.00774).

    With H = X^T X, pruning w_j costs w_j^2 / [H^-1]_jj, and the weights that are left compensate by
    - w_j / [H^-1]_jj * [H^-1]_j: (the optimal brain surgeon, equation 3). From left to right, H is
    that of the columns not yet passed, the same for every row (section 3.2). All these inverses are
    rows of one triangular factor, H^-1 = U^T U (section 3.3). The mask of a group is chosen when
    the group is reached, by w_j^2 / U_jj^2 (section 3.4). Weights on an input that is always 0 are
    pruned first, as in the authors' code.

    Args:
        damping: the share of H's mean diagonal that is added to its diagonal, so that H has an
            inverse; 0.01 in the paper.
    """

    name: ClassVar[str] = "sparsegpt"

    damping: Annotated[float, number(0)] = 0.01

    def prune(self, weight: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
        weight = weight.masked_fill(gram.diagonal() == 0, 0.0)
        factor = inverse_factor(gram, self.damping)
        for block in _blocks(weight.shape[1], pattern):
            first, end = block[0].start, block[-1].stop
            errors = torch.zeros_like(weight[:, first:end])
            for group in block:
                inside = slice(group.start, group.stop)
                costs = weight[:, inside].abs() / factor.diagonal()[inside]
                if pattern.v > 1:  # what a shared column costs is a sum over its rows
                    costs = costs.square()
                pruned = ~nm_mask(costs, pattern.over(len(group)))
                for j in group:
                    gone = pruned[:, j - group.start]
                    error = torch.where(gone, weight[:, j], 0.0) / factor[j, j]
                    weight[:, j:end] -= torch.outer(error, factor[j, j:end])
                    weight[:, j].masked_fill_(gone, 0.0)
                    errors[:, j - first] = error
            weight[:, end:] -= errors @ factor[first:end, end:]
        return weight


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """The upper triangular U with ``U^T U = H^-1``, H = gram + damping * mean diagonal, (inputs,
    inputs). Inputs that are always 0 have 1 on the diagonal, which no other column sees. Raises
    ValueError where H is not positive definite."""
    damped = gram + damping * gram.diagonal().mean() * torch.eye(
        len(gram), dtype=gram.dtype, device=gram.device
    )
    damped.diagonal()[gram.diagonal() == 0] += 1.0
    # of the reversed H the lower factor, reversed, is the upper R with R R^T = H
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if bool(failed):
        raise ValueError(
            "the Hessian of its inputs has no inverse: more samples or a larger damping"
        )
    upper = lower.flip(0, 1)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_triangular(upper, identity, upper=True)


def _blocks(columns: int, pattern: Pattern) -> list[list[range]]:
    """The groups of M columns in blocks of some :data:`BLOCK` columns."""
    run, m = pattern.length or columns, pattern.m
    groups = [
        range(start, min(start + m, begin + run))
        for begin in range(0, columns, run)
        for start in range(begin, begin + run, m)
    ]
    together = max(1, BLOCK // m)
    return [groups[i : i + together] for i in range(0, len(groups), together)]
