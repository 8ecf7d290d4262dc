"""Masks, projections and unbiased estimates for any N:M pattern.

The compiled kernels compute them of contiguous weights where they apply, else torch (:mod:`nmrun.sparsity.reference`),
with the same bits. Autograd does not record them. ``dim`` is the dimension that groups run along: 1
for ``nn.Linear`` (out, in) and for convolutions (out, in, kh, kw), whose groups are M input
channels at one kernel position. M must divide its size, or a ValueError says so. With ``pad=True``,
or with a pattern made :meth:`Pattern.over` this size, zeros fill up the last group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels import projection
from nmrun.kernels.layout import has_memory
from nmrun.patterns import Pattern
from nmrun.sparsity import reference
from nmrun.sparsity.reference import along, grouped, ungrouped


@torch.no_grad()
def nm_mask(weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False) -> Tensor:
    """Find the N largest magnitudes of every M consecutive weights.

    Ties keep the lower index. Zeros count like any magnitude. A NaN is always kept, beside the N
    largest, so that it shows in the loss.

    For V:N:M, every block of V outputs and M inputs first keeps the four inputs with the largest
    sum of magnitudes. The N largest of each row are then found among these (Zhao et al. 2024, arXiv
    2410.16135; VENOM's code searches all sets of four inputs instead).

    Example: ``nm_mask(torch.tensor([[3., -1., 2., 0.]]), "2:4")`` is ``[[True, False, True,
    False]]``.

    Args:
        weight: of any shape.
        dim: the dimension that groups run along: 1 for ``nn.Linear`` (out, in) and convolutions
            (out, in, height, width).
        pad: let the last group be short.

    Returns:
        The mask: bool, shape of ``weight``, True = kept. Each group has exactly N, and a short last
            group of N or fewer weights keeps all.

    Raises:
        ValueError: for a ``dim`` that ``weight`` has not, and where M does not divide its size, unless
            ``pad``. Also where V does not divide the number of outputs: dimension 0, or 1 where
            ``dim`` is 0.
    """
    pattern, dim = _over(weight, pattern, dim, pad)
    mask = torch.empty_like(weight, dtype=torch.bool)
    if _fits_kernels(weight, pattern) and projection.mask(weight.detach(), mask, pattern, dim):
        return mask
    return reference.nm_mask(weight, pattern, dim)


@torch.no_grad()
def hard_threshold(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> Tensor:
    """Keep the N largest magnitudes of every M consecutive weights and set the others to 0: the
    projection of SR-STE and STEP.

    Arguments and errors are those of :func:`nm_mask`. Returns a new tensor in shape and dtype of
    ``weight``: ``weight`` where the mask is True, +0.0 elsewhere.
    """
    pattern, dim = _over(weight, pattern, dim, pad)
    projected = _kernel_projection(weight, pattern, dim, soft=False)
    return reference.hard_threshold(weight, pattern, dim) if projected is None else projected


@torch.no_grad()
def soft_threshold(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False, gamma: float = 0.0
) -> Tensor:
    """Shrink all magnitudes of a group so that at most N are left: S-STE's continuous projection before
    scaling, ``S(w) = sign(w) * max(|w| - t, 0)`` (Hu et al. 2024, arXiv 2409.09099, section 4.1).

    The threshold t is the (N+1)-th largest magnitude of the group, and 0 in a group of N or fewer.
    No smaller t leaves at most N non-zeros. For c > 0, ``S(c * w) = c * S(w)``. Every t from there
    up to the N-th largest magnitude is continuous too: ``gamma``, 0 to 1, says how far t is on the
    way.

    Other arguments and errors are those of :func:`nm_mask`. Also raises ValueError for another gamma
    and for V:N:M patterns. Returns S(w), in shape and dtype of ``weight``.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma}: it takes a number from 0 to 1")
    pattern, dim = _over(weight, pattern, dim, pad)
    projected = None if gamma else _kernel_projection(weight, pattern, dim, soft=True)
    return reference.soft_threshold(weight, pattern, dim, gamma) if projected is None else projected


@torch.no_grad()
def soft_threshold_scale(
    weight: Tensor,
    pattern: str | Pattern,
    dim: int = 1,
    pad: bool = False,
    gamma: float = 0.0,
    fit: str = "mse",
) -> Tensor:
    """The factor that makes up for what :func:`soft_threshold` shrinks: S-STE's beta (Hu et al. 2024,
    arXiv 2409.09099, section 4.2 and table 2).

    ``fit="mse"``: ``beta = <w, S(w)> / ||S(w)||^2``, with which ``beta * S(w)`` is nearest to ``w``
    in the mean square. ``fit="l1"``: ``beta = ||w||_1 / ||S(w)||_1``, which keeps the sum of
    magnitudes. Raises ValueError for another one. Sums are in double precision. Other arguments and
    errors are those of :func:`soft_threshold`.

    Returns beta for the whole tensor: 0-dimensional, in the dtype of ``weight``; 1.0 where S(w) is
    0 everywhere.
    """
    if fit not in ("mse", "l1"):
        raise ValueError(f"fit={fit!r}: it takes mse or l1")
    shrunk = soft_threshold(weight, pattern, dim, pad, gamma).double()
    dense = weight.detach().double()
    if fit == "l1":
        over, under = dense.abs().sum(), shrunk.abs().sum()
    else:
        over, under = (dense * shrunk).sum(), shrunk.square().sum()
    return torch.where(under > 0, over / under, 1.0).to(weight.dtype)


def _over(weight: Tensor, pattern: str | Pattern, dim: int, pad: bool) -> tuple[Pattern, int]:
    pattern, dim = Pattern.parse(pattern), reference.along(weight, dim)
    return (pattern.over(weight.shape[dim]) if pad and weight.dim() else pattern), dim


def _kernel_projection(weight: Tensor, pattern: Pattern, dim: int, soft: bool) -> Tensor | None:
    out = torch.empty_like(weight)
    fits = _fits_kernels(weight, pattern)
    return out if fits and projection.project(weight.detach(), out, pattern, dim, soft) else None


def _fits_kernels(weight: Tensor, pattern: Pattern) -> bool:
    least = 1 if pattern.v == 1 else 2  # blocks have outputs too
    return weight.dim() >= least and has_memory(weight) and weight.is_contiguous()


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
    pattern.without_blocks("mvue")
    if x.is_cuda and generator is None and not pattern.length:
        return torch.ops.nmrun.mvue(x, pattern.n, pattern.m, dim)
    return _estimate(x, pattern, dim, generator)


def _estimate(x: Tensor, pattern: Pattern, dim: int, generator: torch.Generator | None) -> Tensor:
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
    return _estimate(x, pattern, dim, None).contiguous()


def seed(device: torch.device) -> Tensor:
    """A seed for kernels with random numbers of their own, from torch's generator of the device."""
    return torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device)


@_on_device.register_fake
def _(x: Tensor, n: int, m: int, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
