"""Masks and projections in plain torch: the reference that the compiled kernels equal bit for bit,
and what is computed where none applies. What they mean is said in ``nmrun.sparsity.masks``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels.layout import filled
from nmrun.patterns import COLUMNS, Pattern


def along(weight: Tensor, dim: int) -> int:
    """The dimension that groups run along, counted from the front; of a vector the only one, also
    for 1, the usual default. Raises ValueError for a dimension that the tensor has not."""
    count = weight.dim()
    if not -max(count, 1) <= dim < max(count, 2):
        raise ValueError(f"dim={dim}: this tensor has {count} dimensions, {list(weight.shape)}")
    return dim % count if count else 0


def grouped(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> tuple[Tensor, Pattern, int]:
    """View a weight with ``dim`` split into (groups, M), without gradient. ``pad``: let the last
    group be short; the view is then of a copy that zeros fill up. Returns the view, the pattern,
    and the view's dimension that runs over the members of a group. Raises ValueError where M
    does not divide the size of ``dim``."""
    pattern, dim = Pattern.parse(pattern), along(weight, dim)
    if pad and weight.dim():
        pattern = pattern.over(weight.shape[dim])
    return filled(weight.detach(), pattern, dim).unflatten(dim, (-1, pattern.m)), pattern, dim + 1


def ungrouped(groups: Tensor, size: int, d: int) -> Tensor:
    """Undo :func:`grouped`, whose ``d`` runs over the members of a group: one dimension of ``size``
    again, without what filled up a short last group."""
    whole = groups.flatten(d - 1, d)
    return whole if whole.shape[d - 1] == size else whole.narrow(d - 1, 0, size).contiguous()


def by_group(weight: Tensor, pattern: Pattern, dim: int) -> Tensor:
    """A view (..., M) whose last dimension runs over the members of a group; a copy where the last
    group is short. Raises ValueError as :func:`grouped`."""
    groups, _, d = grouped(weight, pattern, dim)
    return groups.movedim(d, -1)


def from_groups(groups: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Undo :func:`by_group`."""
    return ungrouped(groups.movedim(-1, dim + 1), shape[dim], dim + 1)


def _sizes(groups: Tensor) -> Tensor:
    """``|w|``, and -1 for a NaN, which so takes no place among the N largest."""
    return groups.abs().masked_fill_(groups.isnan(), -1.0)


def nm_mask(weight: Tensor, pattern: Pattern, dim: int) -> Tensor:
    groups, pattern, d = grouped(weight, pattern, dim)
    size = _sizes(groups)
    if pattern.v > 1:
        size = size.masked_fill(~_shared_columns(size, pattern, d), -2.0)
    threshold = size.topk(pattern.n, d).values.narrow(d, pattern.n - 1, 1)
    above, equal = size > threshold, size == threshold
    room = pattern.n - above.sum(d, keepdim=True)
    keep = above | (equal & (equal.cumsum(d) <= room)) | groups.isnan()
    return ungrouped(keep, weight.shape[d - 1], d)


def in_blocks(groups: Tensor, pattern: Pattern, d: int) -> Tensor:
    """View groups of :func:`grouped` with the outputs split into (blocks, V), as the first two
    dimensions, and the members of a group last. Raises ValueError where V does not divide the
    number of outputs."""
    outputs = 0 if d > 1 else 2
    rows = groups.movedim((outputs, d), (0, -1))
    if len(rows) % pattern.v:
        raise ValueError(
            f"{pattern} needs a multiple of {pattern.v} outputs; there are {len(rows)}"
        )
    return rows.unflatten(0, (-1, pattern.v))


def _shared_columns(size: Tensor, pattern: Pattern, d: int) -> Tensor:
    """The columns that each V x M block keeps: the four with the largest sum of magnitudes; ties
    keep the lower index. Bool, of the shape of ``size``."""
    blocks = in_blocks(size, pattern, d)
    total = blocks[:, :1].double()
    for output in range(1, pattern.v):  # in this order: the kernels add so too
        total = total + blocks[:, output : output + 1]
    places = total.argsort(dim=-1, descending=True, stable=True)[..., :COLUMNS]
    columns = torch.zeros_like(total, dtype=torch.bool).scatter_(-1, places, True)
    whole = columns.expand_as(blocks).flatten(0, 1)
    return whole.movedim((0, -1), (0 if d > 1 else 2, d))


def holds(groups: Tensor, pattern: Pattern, d: int) -> bool:
    """Whether a weight holds a pattern, from what :func:`grouped` returns."""
    filled = groups != 0
    if bool((filled.sum(d) > pattern.n).any()):
        return False
    if pattern.v == 1:
        return True
    return bool((in_blocks(filled, pattern, d).any(1).sum(-1) <= COLUMNS).all())


def hard_threshold(weight: Tensor, pattern: Pattern, dim: int) -> Tensor:
    kept = torch.where(nm_mask(weight, pattern, dim), weight.detach(), 0.0) + 0.0
    return kept.to(weight.dtype)


def soft_threshold(weight: Tensor, pattern: Pattern, dim: int, gamma: float = 0.0) -> Tensor:
    pattern.without_blocks("a soft threshold")
    groups, pattern, d = grouped(weight, pattern, dim)
    if pattern.n == pattern.m:
        return (weight.detach() + 0.0).to(weight.dtype)
    largest = _sizes(groups).topk(pattern.n + 1, d).values
    threshold = largest.narrow(d, pattern.n, 1).clamp_min(0.0)
    if gamma:
        threshold = torch.lerp(threshold, largest.narrow(d, pattern.n - 1, 1).clamp_min(0.0), gamma)
    shrunk = torch.copysign((groups.abs() - threshold).clamp_min(0.0), groups) + 0.0
    return ungrouped(shrunk.to(weight.dtype), weight.shape[d - 1], d)
