"""SparseGPT: prune column by column, and let the columns to the right make up for it (Frantar &
Alistarh 2023, arXiv 2301.00774).

With H = X^T X, the optimal brain surgeon says what pruning weight j costs, w_j^2 / [H^-1]_jj, and
how the weights that are left compensate, - w_j / [H^-1]_jj * [H^-1]_j: (equation 3). From left to
right, H is that of the columns not yet passed, the same for every row (section 3.2). All these
inverses are rows of one triangular factor, H^-1 = U^T U (section 3.3). The mask of a group of M
columns is chosen when the group is reached, by w_j^2 / U_jj^2 (section 3.4).

Weights on an input that is always 0 do nothing. As in the authors' code they are 0 from the start,
so that they are the first to be pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.oneshot.method import Method
from nmrun.patterns import Pattern
from nmrun.ranges import number
from nmrun.sparsity.masks import nm_mask

# columns whose updates of all columns to their right are made together; the same up to rounding
BLOCK = 128


@dataclass
class SparseGPT(Method):
    """Column by column, with the columns to the right making up for what is pruned (Frantar &
    Alistarh 2023, arXiv 2301.00774).

    With H = X^T X, the optimal brain surgeon says what pruning weight j costs, w_j^2 / [H^-1]_jj,
    and how the weights that are left compensate, - w_j / [H^-1]_jj * [H^-1]_j: (equation 3). From
    left to right, H is that of the columns not yet passed, the same for every row (section 3.2).
    All these inverses are rows of one triangular factor, H^-1 = U^T U (section 3.3). The mask of a
    group of M columns is chosen when the group is reached, by w_j^2 / U_jj^2 (section 3.4). Weights
    on an input that is always 0 are pruned first, as in the authors' code.

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
    one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_triangular(upper, one, upper=True)


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
