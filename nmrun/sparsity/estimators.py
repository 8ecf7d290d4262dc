"""Unbiased N:M estimates of a dense tensor, for gradients that go through a sparse product."""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels import projection
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import grouped


@torch.no_grad()
def inclusion_probabilities(x: Tensor, pattern: str | Pattern, dim: int) -> Tensor:
    """``min(1, c |x|)`` with c such that each group of M sums to N: the choice of smallest
    variance. Shape of x, float64.

    The largest entries whose share would exceed one are capped, the rest renormalised, until
    nothing changes (at most N rounds). Groups with fewer than N non-zeros keep them all.
    """
    groups, pattern, d = grouped(x, pattern, dim)
    size = groups.abs().double()
    capped = torch.zeros_like(size, dtype=torch.bool)
    for _ in range(pattern.n):
        rest = size.masked_fill(capped, 0.0)
        room = pattern.n - capped.sum(d, keepdim=True)
        total = rest.sum(d, keepdim=True)
        share = torch.where(total > 0, room * rest / total, 0.0)
        capped |= share >= 1.0
    rest = size.masked_fill(capped, 0.0)
    room = pattern.n - capped.sum(d, keepdim=True)
    total = rest.sum(d, keepdim=True)
    share = torch.where(total > 0, room * rest / total, 0.0).clamp_max(1.0)
    return torch.where(capped, 1.0, share).flatten(d - 1, d)


@torch.no_grad()
def mvue(
    x: Tensor, pattern: str | Pattern, dim: int, generator: torch.Generator | None = None
) -> Tensor:
    """The minimum-variance unbiased N:M estimate of ``x``: at most N non-zeros a group of M along
    ``dim``, mean equal to x.

    Entry i is kept with probability p_i of :func:`inclusion_probabilities` and then divided by it
    (Horvitz-Thompson). All designs with these marginals have the same, smallest variance ``sum
    x_i^2 (1 / p_i - 1)``; this one is systematic sampling, one uniform number a group, drawn from
    ``generator`` (default: torch's global generator of the device). Same shape and dtype as ``x``.
    A group with a NaN or an infinity, which have no such estimate, becomes NaN. On CUDA devices
    with the global generator it is one Triton kernel where that applies, with random numbers of its
    own (see ``nmrun.kernels.triton_mvue``).
    """
    pattern = Pattern.parse(pattern)
    if x.is_cuda and generator is None and not pattern.length:
        return torch.ops.nmrun.mvue(x, pattern.n, pattern.m, dim % max(1, x.dim()))
    return _reference(x, pattern, dim, generator)


def _reference(x: Tensor, pattern: Pattern, dim: int, generator: torch.Generator | None) -> Tensor:
    probability = inclusion_probabilities(x, pattern, dim)
    p, pattern, d = grouped(probability, pattern, dim)
    groups = grouped(x, pattern, dim)[0]
    ends = p.cumsum(d)
    # rounding must not cost or add a pick: group totals are whole numbers, so pull the last end
    # onto one
    last = ends.narrow(d, pattern.m - 1, 1).round()
    ends = torch.minimum(ends, last)
    ends = torch.cat([ends.narrow(d, 0, pattern.m - 1), last], d)
    shape = list(p.shape)
    shape[d] = 1
    start = torch.rand(shape, dtype=torch.float64, device=x.device, generator=generator)
    ticks = (ends + start).floor()
    before = torch.cat([torch.zeros_like(start), ticks.narrow(d, 0, pattern.m - 1)], d)
    keep = (ticks > before) & (p > 0)
    estimate = torch.where(
        keep, groups.double() / p.clamp_min(torch.finfo(torch.float64).tiny), 0.0
    )
    finite = groups.isfinite().all(d, keepdim=True)
    return torch.where(finite, estimate, torch.nan).flatten(d - 1, d).to(x.dtype)


@torch.library.custom_op("nmrun::mvue", mutates_args=())
def _on_device(x: Tensor, n: int, m: int, dim: int) -> Tensor:
    """By one kernel where there is one; a single operator for torch.compile."""
    pattern = Pattern(n, m)
    if projection.by_triton(x, pattern):
        from nmrun.kernels import triton_mvue

        if triton_mvue.applies(x, pattern, dim):
            out = torch.empty_like(x)
            triton_mvue.estimate(
                x,
                out,
                pattern,
                dim,
                torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=x.device),
            )
            return out
    return _reference(x, pattern, dim, None)


@_on_device.register_fake
def _(x: Tensor, n: int, m: int, dim: int) -> Tensor:
    return torch.empty_like(x)
