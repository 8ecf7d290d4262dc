"""Masks and projections for any N:M pattern, in plain torch: the reference that every faster
version must equal bit for bit.

``dim`` is the dimension that groups run along: 1 for ``nn.Linear`` (out, in) and for convolutions
(out, in, kh, kw), whose groups are M input channels at one kernel position. Functions here take no
part in autograd.

M must divide the size of that dimension. With ``pad=True``, or a pattern made :meth:`Pattern.over`
this size, it need not: the last group is short, and treated as if zeros filled it up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels.layout import filled
from nmrun.patterns import Pattern


def grouped(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> tuple[Tensor, Pattern, int]:
    """View ``weight`` with ``dim`` split into (groups, M); returns the view, the parsed pattern and
    the group dimension.

    Raises ValueError when M does not divide ``weight.shape[dim]``, unless the last group may be
    short (see above): then the view is of a copy that is filled up with zeros, and
    :func:`ungrouped` takes them off.
    """
    pattern = Pattern.parse(pattern)
    dim = dim % weight.dim() if weight.dim() else 0
    if pad and weight.dim():
        pattern = pattern.over(weight.shape[dim])
    return filled(weight.detach(), pattern, dim).unflatten(dim, (-1, pattern.m)), pattern, dim + 1


def ungrouped(groups: Tensor, size: int, d: int) -> Tensor:
    """The inverse of :func:`grouped`, for its group dimension d: one dimension of ``size`` again,
    whatever filled it up cut off.
    """
    whole = groups.flatten(d - 1, d)
    return whole if whole.shape[d - 1] == size else whole.narrow(d - 1, 0, size).contiguous()


def _sizes(groups: Tensor) -> Tensor:
    """``|w|``, and -1 for a NaN: it takes no place among the N largest."""
    return groups.abs().masked_fill_(groups.isnan(), -1.0)


@torch.no_grad()
def nm_mask(weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False) -> Tensor:
    """The magnitude mask: True at the N largest ``|w|`` of every group of M along ``dim``.

    Same shape as ``weight``, dtype bool; exactly N are True in each group (all of a short one that
    has no more), ties keep the lower index, zeros count like any magnitude. A NaN is always kept,
    on top of the N, so that it shows in the loss instead of being pruned away.

    Example: ``nm_mask(torch.tensor([[3., -1., 2., 0.]]), "2:4")`` is ``[[True, False, True,
    False]]``.
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
    """``weight`` where :func:`nm_mask` is True, +0.0 elsewhere: the projection of SR-STE and STEP."""
    return torch.where(nm_mask(weight, pattern, dim, pad), weight, 0.0) + 0.0


@torch.no_grad()
def soft_threshold(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> Tensor:
    """S-STE's continuous projection before scaling, ``sign(w) * max(|w| - t, 0)`` (Hu et al. 2024,
    arXiv 2409.09099, section 4.1).

    ``t`` is the (N+1)-th largest magnitude of the group (0 when it has no more than N): the
    smallest shift for which at most N weights survive and the map is continuous. It is homogeneous:
    ``soft_threshold(c * w) = c * soft_threshold(w)`` for c > 0.
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
    """S-STE's beta, ``<w, S(w)> / ||S(w)||^2``: the factor for which ``beta * S(w)`` is closest to
    ``w`` in the mean square.

    A 0-dimensional tensor in the dtype of ``weight``, summed in double precision; one scale a
    weight tensor (section 4.2 of the paper). 1.0 where S(w) is all zero, since then no factor is
    better than another.
    """
    shrunk = soft_threshold(weight, pattern, dim, pad).double()
    energy = shrunk.square().sum()
    scale = torch.where(energy > 0, (weight.detach().double() * shrunk).sum() / energy, 1.0)
    return scale.to(weight.dtype)
