"""Unbiased N:M estimates of a dense tensor, for gradients that go through a sparse product."""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels import projection
from nmrun.patterns import Pattern
from nmrun.sparsity.reference import along, grouped, ungrouped


@torch.no_grad()
def inclusion_probabilities(x: Tensor, pattern: str | Pattern, dim: int) -> Tensor:
    """The probability with which :func:`mvue` keeps each entry: shape of x, float64. ``min(1, c
    |x|)``, with c such that each group sums to N: the smallest variance. Entries whose share
    would exceed 1 get 1, and the others are scaled anew, N times at most. In a group with N
    non-zeros or fewer it is 1 where x is not 0."""
    groups, pattern, d = grouped(x, pattern, dim)
    size = groups.abs().double()
    capped = torch.zeros_like(size, dtype=torch.bool)
    for _ in range(pattern.n + 1):
        rest = size.masked_fill(capped, 0.0)
        room = pattern.n - capped.sum(d, keepdim=True)
        total = rest.sum(d, keepdim=True)
        share = torch.where(total > 0, room * rest / total, 0.0)
        capped |= share >= 1.0
    return ungrouped(torch.where(capped, 1.0, share), x.shape[d - 1], d)


@torch.no_grad()
def mvue(
    x: Tensor, pattern: str | Pattern, dim: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the minimum-variance unbiased N:M estimate of a tensor (Chmiel et al. 2023, arXiv
    2203.10991).

    Entry i is kept with probability p_i and then divided by p_i (Horvitz-Thompson), so the
    estimate's mean is x. All designs with these probabilities have the same, smallest variance,
    ``sum x_i^2 (1 / p_i - 1)``. Here entries are drawn by systematic sampling, with one uniform
    number a group.

    Args:
        x: of any shape.
        dim: the dimension that groups run along.
        generator: draws the random numbers; by default torch's global one of the device. On CUDA
            devices the default may run as one Triton kernel, with random numbers of its own.

    Returns:
        The estimate: shape and dtype of x, at most N non-zeros in each group. A group with a NaN or
            an infinity becomes NaN.

    Raises:
        ValueError: where M does not divide the size of ``dim``, and for V:N:M patterns.
    """
    pattern, dim = Pattern.parse(pattern), along(x, dim)
    if pattern.v > 1:
        raise ValueError(f"estimates are N:M, not V:N:M such as {pattern}")
    if x.is_cuda and generator is None and not pattern.length:
        return torch.ops.nmrun.mvue(x, pattern.n, pattern.m, dim)
    return _reference(x, pattern, dim, generator)


def _reference(x: Tensor, pattern: Pattern, dim: int, generator: torch.Generator | None) -> Tensor:
    probability = inclusion_probabilities(x, pattern, dim)
    p, pattern, d = grouped(probability, pattern, dim)
    groups = grouped(x, pattern, dim)[0]
    ends = p.cumsum(d)
    # a group's total is a whole number, up to rounding errors that would lose or add a pick
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
    estimate = torch.where(finite, estimate, torch.nan)
    return ungrouped(estimate, x.shape[d - 1], d).to(x.dtype)


@torch.library.custom_op("nmrun::mvue", mutates_args=())
def _on_device(x: Tensor, n: int, m: int, dim: int) -> Tensor:
    """By one kernel where there is one; torch.compile sees a single operator."""
    pattern = Pattern(n, m)
    if projection.by_triton(x, pattern):
        from nmrun.kernels import triton_mvue

        if triton_mvue.applies(x, pattern, dim):
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            triton_mvue.estimate(x, out, pattern, dim, seed(x.device))
            return out
    return _reference(x, pattern, dim, None).contiguous()


def seed(device: torch.device) -> Tensor:
    """A seed for kernels with random numbers of their own, from torch's generator of the device."""
    return torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device)


@_on_device.register_fake
def _(x: Tensor, n: int, m: int, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
