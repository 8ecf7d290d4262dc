"""Compiled masks and projections: C on the CPU, Triton on CUDA devices, with the bits of the torch
reference in ``nmrun.sparsity.reference``.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from nmrun.kernels import cpu
from nmrun.kernels.layout import LARGEST
from nmrun.patterns import COLUMNS, Pattern


def project(
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    soft: bool = False,
    scale: float | Tensor = 1.0,
    factor: float = 0.0,
) -> bool:
    """Write the N:M projection of ``weight`` into ``out``, or return False where no compiled kernel
    applies. Hard threshold by default; ``soft``: the soft threshold times ``scale``, a number or
    a 0-dimensional tensor; ``factor`` above 0: the mixture ``w * (m + (1 - m) * factor)``. Never
    waits for a CUDA device, but once a pattern for a check."""
    if weight.device.type == "cpu":
        return cpu.project(weight, out, pattern, dim, soft, float(scale), factor)
    if not has_kernel(weight, pattern):
        return False
    mode = "soft" if soft else "decayed" if factor else "hard"
    by_tensor = scale if isinstance(scale, Tensor) else None
    amount = factor if factor else 1.0 if isinstance(scale, Tensor) else scale
    return _launched(weight, out, pattern, dim, mode, amount, by_tensor)


def mask(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Write the N:M mask of ``weight`` into ``out`` (bool, True = kept), or return False as
    :func:`project`."""
    if weight.device.type == "cpu":
        return cpu.mask(weight, out, pattern, dim)
    if not has_kernel(weight, pattern):
        return False
    ones = torch.empty_like(weight)  # kernels write the weight's dtype
    success = _launched(weight, ones, pattern, dim, "mask")
    if success:
        out.copy_(ones)
    return success


def _launched(
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    mode: str,
    amount: float = 1.0,
    scale: Tensor | None = None,
) -> bool:
    from nmrun.kernels import triton_blocks, triton_projection

    if pattern.v > 1:
        return triton_blocks.project(weight, out, pattern, dim, mode, amount)
    return triton_projection.project(weight, out, pattern, dim, mode, amount, scale)


def by_triton(weight: Tensor, pattern: Pattern) -> bool:
    """Whether all of Triton's kernels are there for a weight, as :func:`has_kernel`; V:N:M weights have
    only the projection."""
    return pattern.v == 1 and has_kernel(weight, pattern)


def has_kernel(weight: Tensor, pattern: Pattern) -> bool:
    """Whether Triton projects a weight: on a CUDA device where that works."""
    return (
        weight.is_cuda
        and weight.numel() < LARGEST
        and on_cuda(weight.device, pattern.n, pattern.m, pattern.v)
    )


@cache
def on_cuda(device: torch.device, n: int, m: int, v: int = 1) -> bool:
    """Whether Triton's kernels for N:M or V:N:M work on this device: built and compared with the
    reference once, on a small weight. Triton comes with torch for Linux; it needs a C compiler when
    it runs. What goes wrong is logged, and the reference taken."""
    try:
        from nmrun.kernels import triton_blocks, triton_groups, triton_projection
    except ImportError:
        return False
    if m > (triton_groups if v == 1 else triton_blocks).LARGEST_M:
        return False
    kernel, pattern = triton_projection if v == 1 else triton_blocks, Pattern(n, m, v=v)
    # (block, V, M), with ties
    count = 512 if v == 1 else 4
    blocks = torch.arange(count * v * m, dtype=torch.float32).mul_(0.7).sin_().mul_(8).round_()
    blocks = blocks.view(count, v, m)
    size = blocks.abs()
    if v > 1:
        columns = size.sum(1, keepdim=True).argsort(stable=True, descending=True)[..., :COLUMNS]
        others = torch.ones(count, 1, m, dtype=torch.bool).scatter_(-1, columns, False)
        size = size.masked_fill(others, -1)
    # stable: ties keep the lower index
    kept = size.argsort(stable=True, descending=True)[..., :n]
    expected = torch.zeros_like(blocks).scatter_(-1, kept, blocks.gather(-1, kept)).flatten(0, 1)
    weight = blocks.flatten(0, 1)

    def right(weight: Tensor, expected: Tensor, dim: int) -> bool:
        on_device = weight.contiguous().to(device)
        out = torch.empty_like(on_device)
        projected = kernel.project(on_device, out, pattern, dim)
        return projected and bool((out.cpu() == expected).all())

    def compare() -> bool:
        # N:M has code of its own along the first dimension
        return right(weight, expected, 1) and (v > 1 or right(weight.t(), expected.t(), 0))

    return agrees(f"Triton's {pattern} projection", device, compare, "the reference")


def agrees(kernel: str, device: torch.device, compare: Callable[[], bool], instead: str) -> bool:
    """Whether ``compare`` finds the kernel right. Where it does not, or raises whatever a compiler
    or a driver can say, the log says that ``instead`` is taken. Without Triton, False."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        right, trouble = compare(), "wrong numbers"
    except Exception as error:
        right, trouble = False, f"{type(error).__name__}: {error}"
    if not right:
        logging.getLogger(__name__).warning(
            "%s is not used on %s, %s is (%s)", kernel, device, instead, trouble
        )
    return right
