"""The possible masks of one group, and views of a weight by group.

Recipes that learn a choice among masks work on both (MaskLLM, LBC).
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.sparsity.reference import grouped, ungrouped

# candidates a group; beyond, their scores outweigh the weights many times over (4:16 has 1,820)
MOST = 256


@cache
def _rows(pattern: Pattern) -> Tensor:
    rows = torch.zeros(math.comb(pattern.m, pattern.n), pattern.m)
    for row, kept in zip(rows, itertools.combinations(range(pattern.m), pattern.n), strict=True):
        row[list(kept)] = 1.0
    return rows


def candidates(pattern: Pattern, like: Tensor) -> Tensor:
    """Return all masks of a group.

    Args:
        pattern: the N:M pattern.
        like: a tensor; the result has its dtype and device.

    Returns:
        Ones and zeros (C, M) with C = M over N rows, in the order of ``itertools.combinations``.
    """
    return _rows(pattern).to(like.device, like.dtype)


def too_many(pattern: Pattern) -> str:
    """Say why a pattern has too many candidates.

    Returns:
        The reason, or an empty string for up to 256 candidates.
    """
    count = math.comb(pattern.m, pattern.n)
    return (
        f"{pattern} has {count:,} possible masks a group, more than the {MOST} that can have a score each"
        if count > MOST
        else ""
    )


def by_group(weight: Tensor, pattern: Pattern, dim: int) -> Tensor:
    """View a weight by group.

    Args:
        weight: a tensor of any shape.
        pattern: the N:M pattern.
        dim: the dimension that groups run along, from 0.

    Returns:
        A view (..., M) whose last dimension runs over the members of a group. A copy where the last
        group is short: zeros fill that group up.

    Raises:
        ValueError: where M does not divide the size of ``dim`` (see :mod:`nmrun.sparsity.masks`).
    """
    groups, _, d = grouped(weight, pattern, dim)
    return groups.movedim(d, -1)


def from_groups(groups: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Undo :func:`by_group`.

    Args:
        groups: a tensor (..., M).
        shape: the shape of the whole weight.
        dim: the dimension that groups run along, from 0.

    Returns:
        The tensor of this shape, without what filled up a short last group.
    """
    return ungrouped(groups.movedim(-1, dim + 1), shape[dim], dim + 1)


def gumbel_softmax(logits: Tensor, temperature: float, seed: int) -> Tensor:
    """Compute ``softmax((logits + noise) / temperature)`` with Gumbel noise (Jang et al. 2017).

    Args:
        logits: (..., C).
        temperature: above 0.
        seed: of the noise, which depends on nothing else.

    Returns:
        The probabilities, of the same shape; they sum to 1 over the last dimension.
    """
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
    return torch.softmax((logits + noise) / temperature, -1)


def softmax_gradient(soft: Tensor, gradient: Tensor) -> Tensor:
    """Carry a gradient back through a softmax over the last dimension.

    Args:
        soft: the softmax's result (..., C).
        gradient: the gradient at that result, of the same shape.

    Returns:
        The gradient at the softmax's argument, of the same shape.
    """
    return soft * (gradient - (soft * gradient).sum(-1, keepdim=True))
