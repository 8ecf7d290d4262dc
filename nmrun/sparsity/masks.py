"""Masks and projections for any N:M pattern, in plain torch.

Every faster version must equal these functions bit for bit. Autograd does not record them.

``dim`` is the dimension that groups run along: 1 for ``nn.Linear`` (out, in) and for convolutions
(out, in, kh, kw), whose groups are M input channels at one kernel position.

M must divide the size of that dimension, or a ValueError says so. With ``pad=True``, or with a
pattern made :meth:`Pattern.over` this size, the last group may be short: zeros fill it up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels.layout import filled
from nmrun.patterns import Pattern


def grouped(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> tuple[Tensor, Pattern, int]:
    """View a weight with ``dim`` split into (groups, M).

    Args:
        weight: a tensor of any shape.
        pattern: the N:M pattern.
        dim: the dimension that groups run along.
        pad: let the last group be short. The view is then of a copy that zeros fill up.

    Returns:
        The view, without gradient; the pattern; and the dimension of the view that runs over the
        members of a group.

    Raises:
        ValueError: where M does not divide the size of ``dim`` and the last group may not be short.
    """
    pattern = Pattern.parse(pattern)
    dim = dim % weight.dim() if weight.dim() else 0
    if pad and weight.dim():
        pattern = pattern.over(weight.shape[dim])
    return filled(weight.detach(), pattern, dim).unflatten(dim, (-1, pattern.m)), pattern, dim + 1


def ungrouped(groups: Tensor, size: int, d: int) -> Tensor:
    """Undo :func:`grouped`.

    Args:
        groups: a tensor (..., groups, M, ...).
        size: the size of the weight's dimension.
        d: the dimension of ``groups`` that runs over the members of a group.

    Returns:
        The tensor with one dimension of ``size`` again, without what filled up a short last group.
    """
    whole = groups.flatten(d - 1, d)
    return whole if whole.shape[d - 1] == size else whole.narrow(d - 1, 0, size).contiguous()


def _sizes(groups: Tensor) -> Tensor:
    """Compute ``|w|``, and -1 for a NaN, which so takes no place among the N largest."""
    return groups.abs().masked_fill_(groups.isnan(), -1.0)


@torch.no_grad()
def nm_mask(weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False) -> Tensor:
    """Find the N largest magnitudes of every group of M.

    Ties keep the lower index. Zeros count like any magnitude. A NaN is always kept, beside the N
    largest, so that it shows in the loss instead of being pruned away.

    Example: ``nm_mask(torch.tensor([[3., -1., 2., 0.]]), "2:4")`` is ``[[True, False, True,
    False]]``.

    Args:
        weight: a tensor of any shape.
        pattern: the N:M pattern.
        dim: the dimension that groups run along.
        pad: let the last group be short.

    Returns:
        The mask: bool, shape of ``weight``, True = kept. Exactly N are True in each group, and all
        in a short last group of N or fewer.

    Raises:
        ValueError: where M does not divide the size of ``dim`` and the last group may not be short.
    """
    groups, pattern, d = grouped(weight, pattern, dim, pad)
    size = _sizes(groups)
    threshold = size.topk(pattern.n, d).values.narrow(d, pattern.n - 1, 1)
    above, equal = size > threshold, size == threshold
    room = pattern.n - above.sum(d, keepdim=True)
    keep = above | (equal & (equal.cumsum(d) <= room)) | groups.isnan()
    return ungrouped(keep, weight.shape[d - 1], d)


@torch.no_grad()
def hard_threshold(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> Tensor:
    """Keep the N largest magnitudes of every M: the projection of SR-STE and STEP.

    Args:
        weight, pattern, dim, pad: as in :func:`nm_mask`.

    Returns:
        ``weight`` where the mask is True and +0.0 elsewhere; shape and dtype of ``weight``.

    Raises:
        ValueError: as :func:`nm_mask`.
    """
    return torch.where(nm_mask(weight, pattern, dim, pad), weight, 0.0) + 0.0


@torch.no_grad()
def soft_threshold(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> Tensor:
    """Compute S-STE's continuous projection before scaling, ``S(w) = sign(w) * max(|w| - t, 0)``.

    The threshold t is the (N+1)-th largest magnitude of the group, and 0 in a group of N or fewer.
    No smaller t leaves at most N non-zeros. For c > 0, ``S(c * w) = c * S(w)``. From Hu et al.
    2024, arXiv 2409.09099, section 4.1.

    Args:
        weight, pattern, dim, pad: as in :func:`nm_mask`.

    Returns:
        S(w): shape and dtype of ``weight``.

    Raises:
        ValueError: as :func:`nm_mask`.
    """
    groups, pattern, d = grouped(weight, pattern, dim, pad)
    if pattern.n == pattern.m:
        return weight.detach() + 0.0
    threshold = _sizes(groups).topk(pattern.n + 1, d).values.narrow(d, pattern.n, 1).clamp_min(0.0)
    shrunk = torch.copysign((groups.abs() - threshold).clamp_min(0.0), groups) + 0.0
    return ungrouped(shrunk, weight.shape[d - 1], d)


@torch.no_grad()
def soft_threshold_scale(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> Tensor:
    """Compute S-STE's scale of a weight tensor, ``beta = <w, S(w)> / ||S(w)||^2``.

    Of all factors, beta brings ``beta * S(w)`` closest to ``w`` in the mean square. From Hu et al.
    2024, arXiv 2409.09099, section 4.2. Sums are in double precision.

    Args:
        weight, pattern, dim, pad: as in :func:`nm_mask`.

    Returns:
        beta: 0-dimensional, in the dtype of ``weight``; 1.0 where S(w) is 0 everywhere.

    Raises:
        ValueError: as :func:`nm_mask`.
    """
    shrunk = soft_threshold(weight, pattern, dim, pad).double()
    energy = shrunk.square().sum()
    scale = torch.where(energy > 0, (weight.detach().double() * shrunk).sum() / energy, 1.0)
    return scale.to(weight.dtype)
