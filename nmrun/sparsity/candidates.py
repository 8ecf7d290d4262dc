"""The possible masks of one group, and views of a weight by group: what recipes that learn a choice
among masks work on.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.sparsity.masks import grouped, ungrouped

# candidates a group; beyond, their scores outweigh the weights many times over (4:16 has 1,820)
MOST = 256


@cache
def _rows(pattern: Pattern) -> Tensor:
    rows = torch.zeros(math.comb(pattern.m, pattern.n), pattern.m)
    for row, kept in zip(rows, itertools.combinations(range(pattern.m), pattern.n), strict=True):
        row[list(kept)] = 1.0
    return rows


def candidates(pattern: Pattern, like: Tensor) -> Tensor:
    """All masks of a group, (C, M) with C = M over N, in the order of ``itertools.combinations``;
    ones and zeros, placed as ``like``.
    """
    return _rows(pattern).to(like.device, like.dtype)


def too_many(pattern: Pattern) -> str:
    """Why a pattern has too many candidates, or an empty string."""
    count = math.comb(pattern.m, pattern.n)
    return (
        f"{pattern} has {count:,} possible masks a group, more than the {MOST} that can have a score each"
        if count > MOST
        else ""
    )


def by_group(weight: Tensor, pattern: Pattern, dim: int) -> Tensor:
    """A view (..., M) whose last dimension runs over the members of a group; a short last group
    filled up with zeros.
    """
    groups, _, d = grouped(weight, pattern, dim)
    return groups.movedim(d, -1)


def from_groups(groups: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """The inverse of :func:`by_group`: (..., M) back to ``shape``."""
    return ungrouped(groups.movedim(-1, dim + 1), shape[dim], dim + 1)


def gumbel_softmax(logits: Tensor, temperature: float, seed: int) -> Tensor:
    """``softmax((logits + Gumbel noise) / temperature)`` over the last dimension, the noise drawn
    from this seed alone.
    """
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
    return torch.softmax((logits + noise) / temperature, -1)


def softmax_gradient(soft: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of what a softmax was given, from that of its result."""
    return soft * (gradient - (soft * gradient).sum(-1, keepdim=True))
