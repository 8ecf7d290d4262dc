"""The proximal operator of ProxSparse's regulariser (Liu et al. 2025, arXiv 2502.00258, ICML 2025).

The regulariser of a group is the sum over all choices of N + 1 of its weights of the product of their
magnitudes: 0 exactly for groups with at most N non-zeros. The paper and its code have 2:4, where it is
``|abc| + |abd| + |acd| + |bcd|``; for other patterns the definition is carried over here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.sparsity.candidates import by_group, from_groups

MOST = 8  # members of a group: (M - N) descents of up to 100 sweeps over M weights
SWEEPS = 100  # the authors' limit, rarely needed


@torch.no_grad()
def proximal(weight: Tensor, pattern: Pattern, dim: int, strength: float) -> Tensor:
    """Find the w that minimises ``1/2 ||w - weight||^2 + strength * regulariser(w)`` in every group.

    Algorithm 3 of the paper (EnumALM): a minimiser has the signs and the order of ``weight`` and k
    non-zeros, N to M of them; for each k the k largest magnitudes are moved in turn to their best
    values, and the best k counts.

    Args:
        weight: a tensor of any shape.
        pattern: the N:M pattern, M at most 8.
        dim: the dimension that groups run along, from 0.
        strength: the factor of the regulariser, lambda.

    Returns:
        A new tensor of the same shape.
    """
    groups = by_group(weight, pattern, dim)
    ordered, places = groups.abs().sort(-1, descending=True)
    magnitudes = ordered.flatten(0, -2).T.contiguous()  # (M, groups): a product reads whole rows
    best = magnitudes.clone()
    best[pattern.n :] = 0
    lowest = magnitudes[pattern.n :].square().sum(0) / 2
    for k in range(pattern.n + 1, pattern.m + 1):
        found = _descend(magnitudes, k, pattern.n, strength)
        value = (found - magnitudes).square().sum(0) / 2 + strength * _products(
            found, pattern.n + 1
        )
        better = value < lowest
        best, lowest = torch.where(better, found, best), torch.where(better, value, lowest)
    moved = torch.zeros_like(ordered).scatter_(-1, places, best.T.view(places.shape))
    return from_groups(moved * groups.sign(), weight.shape, dim)


def _descend(magnitudes: Tensor, k: int, n: int, strength: float) -> Tensor:
    """The k largest magnitudes (M, groups), each moved to its minimiser given the others, in turn,
    until none of its group moves; the others 0."""
    found = torch.zeros_like(magnitudes)
    left = torch.arange(magnitudes.shape[1], device=magnitudes.device)  # groups that still move
    wanted, now = magnitudes[:k], found[:k]
    for _ in range(SWEEPS):
        before, now = now, now.clone()
        # the products of the members in front of i, as they were, and of those behind, as they are
        front = [_none(now, n)]
        for i in range(k - 1):
            front.append(_with(front[-1], before[i]))
        behind = _none(now, n)
        for i in reversed(range(k)):
            others = (front[i] * behind.flip(0)).sum(0)
            now[i] = (wanted[i] - strength * others).clamp_min(0)
            behind = _with(behind, now[i])
        moves = ((now - before).abs() > 1e-6 * before).any(0)
        found[:k, left] = now
        left, wanted, now = left[moves], wanted[:, moves], now[:, moves]
        if not len(left):
            break
    return found


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
