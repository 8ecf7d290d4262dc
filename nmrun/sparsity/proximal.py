"""The proximal operator of ProxSparse's regulariser (Liu et al. 2025, arXiv 2502.00258, ICML 2025).

The regulariser of a group is the sum over all choices of N + 1 of its weights of the product of their
magnitudes: 0 exactly for groups with at most N non-zeros. The paper and its code have 2:4, where it is
``|abc| + |abd| + |acd| + |bcd|``; for other patterns the definition is carried over here.
"""

from __future__ import annotations

import itertools

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
    magnitudes, places = groups.abs().sort(-1, descending=True)
    best = lowest = torch.empty(0)
    for k in range(pattern.n, pattern.m + 1):
        found = _descend(magnitudes, k, pattern.n, strength)
        value = (found - magnitudes).square().sum(-1) / 2
        value += strength * _products(found, range(pattern.m), pattern.n + 1)
        better = value < lowest if k > pattern.n else torch.ones_like(value, dtype=torch.bool)
        best = torch.where(better[..., None], found, best if k > pattern.n else found)
        lowest = torch.where(better, value, lowest if k > pattern.n else value)
    moved = torch.zeros_like(magnitudes).scatter_(-1, places, best) * groups.sign()
    return from_groups(moved, weight.shape, dim)


def _descend(magnitudes: Tensor, k: int, n: int, strength: float) -> Tensor:
    """The k largest magnitudes, each moved to its minimiser given the others, in turn, until none
    moves; the others 0."""
    found = torch.zeros_like(magnitudes)
    if k == n:
        found[..., :k] = magnitudes[..., :k]
        return found
    for _ in range(SWEEPS):
        before = found.clone()
        for i in reversed(range(k)):
            others = _products(found, [j for j in range(k) if j != i], n)
            found[..., i] = (magnitudes[..., i] - strength * others).clamp_min(0)
        if torch.allclose(found, before, rtol=1e-6, atol=0.0):
            break
    return found


def _products(magnitudes: Tensor, members: range | list[int], count: int) -> Tensor:
    """The sum over all choices of ``count`` members of their product."""
    return torch.stack(
        [
            magnitudes[..., list(chosen)].prod(-1)
            for chosen in itertools.combinations(members, count)
        ]
    ).sum(0)
