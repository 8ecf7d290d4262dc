"""Transposable masks: every M x M block keeps N weights in each row and in each column.

The weight and its transpose are then both N:M.
"""

from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import Tensor

from nmrun.kernels.layout import filled
from nmrun.patterns import Pattern
from nmrun.sparsity.transport import best_masks

ENUMERATED_UP_TO = 4  # 90 candidates for 2:4; 1:8 alone would have 40,320


@cache
def block_patterns(n: int, m: int) -> Tensor:
    """List all 0/1 matrices whose rows and columns each sum to n. Feasible for m up to 4.

    Args:
        n: ones of a row.
        m: rows and columns.

    Returns:
        (count, m, m), float64; 90 of them for 2:4.
    """
    rows = [row for row in itertools.product((0, 1), repeat=m) if sum(row) == n]
    blocks = [
        b
        for b in itertools.product(rows, repeat=m)
        if all(sum(column) == n for column in zip(*b, strict=True))
    ]
    return torch.tensor(blocks, dtype=torch.float64)


@torch.no_grad()
def transposable_mask(weight: Tensor, pattern: str | Pattern, pad: bool = False) -> Tensor:
    """Find the transposable N:M mask that keeps the largest sum of ``|w|``, exactly.

    For M <= 4 all masks of a block are compared at once (Hu et al. 2024, arXiv 2404.01847,
    algorithm 1). For larger M each block is an assignment problem at 1:M, solved on the CPU by
    scipy; else all blocks are solved together as transportation problems
    (:mod:`nmrun.sparsity.transport`).

    Args:
        weight: a matrix (out, in); both sizes are multiples of M.
        pattern: the N:M pattern.
        pad: let ``in`` be any size. Zeros fill up the last blocks. They take places in their rows,
            so rows keep N or fewer there.

    Returns:
        The mask: bool, shape of ``weight``, True = kept.

    Raises:
        ValueError: for a tensor of other dimensions or sizes.
    """
    pattern = Pattern.parse(pattern)
    n, m = pattern.n, pattern.m
    if pad and weight.dim() == 2:
        pattern = pattern.over(weight.shape[1])
    if (
        weight.dim() != 2
        or weight.shape[0] % m
        or (weight.shape[1] % m and weight.shape[1] != pattern.length)
    ):
        raise ValueError(
            f"a transposable {pattern} mask needs a matrix with both sides multiples of {m}, not {tuple(weight.shape)}"
        )
    whole = filled(weight.detach(), pattern, 1)
    rows, columns = whole.shape[0] // m, whole.shape[1] // m
    blocks = whole.abs().reshape(rows, m, columns, m).transpose(1, 2).reshape(-1, m * m).double()
    if m <= ENUMERATED_UP_TO:
        candidates = block_patterns(n, m).to(weight.device).flatten(1)
        chosen = candidates[(blocks @ candidates.T).argmax(1)]
    elif n == 1:
        chosen = torch.stack([_assigned(block) for block in blocks.unflatten(1, (m, m)).cpu()])
        chosen = chosen.to(weight.device)
    else:
        chosen = best_masks(blocks.unflatten(1, (m, m)), n)
    return (
        chosen.bool()
        .reshape(rows, columns, m, m)
        .transpose(1, 2)
        .reshape(whole.shape)[:, : weight.shape[1]]
    )


def _assigned(block: Tensor) -> Tensor:
    """The best mask of one block (M, M) with one in each row and column."""
    from scipy.optimize import linear_sum_assignment

    mask = torch.zeros_like(block)
    mask[linear_sum_assignment(block.numpy(), maximize=True)] = 1.0
    return mask
