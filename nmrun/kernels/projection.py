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
    mode = "soft" if soft else "decayed" if factor else "hard"
    if pattern.v > 1:
        return _blocks(weight, out, pattern, dim, mode, factor)
    if not by_triton(weight, pattern):
        return False
    from nmrun.kernels import triton_projection

    by_tensor = scale if isinstance(scale, Tensor) else None
    amount = factor if factor else 1.0 if isinstance(scale, Tensor) else scale
    return triton_projection.project(weight, out, pattern, dim, mode, amount, by_tensor)


def mask(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Write the N:M mask of ``weight`` into ``out`` (bool, True = kept), or return False as
    :func:`project`."""
    if weight.device.type == "cpu":
        return cpu.mask(weight, out, pattern, dim)
    ones = torch.empty_like(weight)  # kernels write the weight's dtype
    if pattern.v > 1:
        success = _blocks(weight, ones, pattern, dim, "mask")
    elif by_triton(weight, pattern):
        from nmrun.kernels import triton_projection

        success = triton_projection.project(weight, ones, pattern, dim, "mask")
    else:
        return False
    if success:
        out.copy_(ones)
    return success


def _blocks(
    weight: Tensor, out: Tensor, pattern: Pattern, dim: int, mode: str, factor: float = 1.0
) -> bool:
    """The same of a V:N:M pattern, by a kernel of its own."""
    if not (weight.is_cuda and blocks_on_cuda(weight.device, pattern)):
        return False
    from nmrun.kernels import triton_blocks

    return triton_blocks.project(weight, out, pattern, dim, mode, factor)


@cache
def blocks_on_cuda(device: torch.device, pattern: Pattern) -> bool:
    """Whether the kernel of V:N:M patterns works on this device, as :func:`on_cuda`."""
    try:
        from nmrun.kernels import triton_blocks
    except ImportError:
        return False
    # four blocks, with ties; (block, V, M)
    weight = torch.arange(4 * pattern.v * pattern.m, dtype=torch.float32)
    weight = weight.mul_(0.7).sin_().mul_(8).round_().view(4, pattern.v, pattern.m)
    columns = weight.abs().sum(1, keepdim=True).argsort(stable=True, descending=True)[..., :COLUMNS]
    others = torch.ones(4, 1, pattern.m, dtype=torch.bool).scatter_(-1, columns, False)
    size = weight.abs().masked_fill(others, -1)
    kept = size.argsort(stable=True, descending=True)[..., : pattern.n]
    expected = torch.zeros_like(weight).scatter_(-1, kept, weight.gather(-1, kept)).flatten(0, 1)

    def compare() -> bool:
        on_device = weight.flatten(0, 1).to(device)
        out = torch.empty_like(on_device)
        projected = triton_blocks.project(on_device, out, pattern, 1)
        return projected and bool((out.cpu() == expected).all())

    return agrees(f"Triton's {pattern} projection", device, compare, "the reference")


def by_triton(weight: Tensor, pattern: Pattern) -> bool:
    """Whether Triton's kernels are there for a weight: on a CUDA device where they work."""
    return (
        weight.is_cuda
        and pattern.v == 1
        and weight.numel() < LARGEST
        and on_cuda(weight.device, pattern.n, pattern.m)
    )


@cache
def on_cuda(device: torch.device, n: int, m: int) -> bool:
    """Whether Triton's kernels for N:M work on this device: built and compared with the reference
    once, on a small weight. Triton comes with torch for Linux; it needs a C compiler when it
    runs. What goes wrong is logged, and the reference taken."""
    try:
        from nmrun.kernels import triton_groups, triton_projection
    except ImportError:
        return False
    if m > triton_groups.LARGEST_M:
        return False
    # with ties; also along the first dimension, which has code of its own
    weight = torch.arange(512 * m, dtype=torch.float32).mul_(0.7).sin_().mul_(8).round_()
    weight = weight.view(512, m)
    # stable: ties keep the lower index
    indices = weight.abs().argsort(stable=True, dim=1, descending=True)[:, :n]
    expected = torch.zeros_like(weight).scatter_(1, indices, weight.gather(1, indices))

    def right(weight: Tensor, expected: Tensor, dim: int) -> bool:
        on_device = weight.contiguous().to(device)
        out = torch.empty_like(on_device)
        projected = triton_projection.project(on_device, out, Pattern(n, m), dim)
        return projected and bool((out.cpu() == expected).all())

    def compare() -> bool:
        return right(weight, expected, 1) and right(weight.t(), expected.t(), 0)

    return agrees(f"Triton's {n}:{m} projection", device, compare, "the reference")


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
