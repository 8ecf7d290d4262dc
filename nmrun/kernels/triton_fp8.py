"""Rounding to FP8 with one scale for a tensor on CUDA devices, in Triton: two reads and one write,
where torch's operations one by one move some 27 bytes a number of 16 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.layout import LARGEST
from nmrun.kernels.triton_launches import DTYPES, on

BLOCK = 4096  # numbers a program has
FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def find_largest(x, bits, count, BLOCK: tl.constexpr):
    """Raise ``bits`` to those of the largest magnitude; those of a NaN are above all others."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = tl.abs(tl.load(x + at, at < count, other=0.0).to(tl.float32))
    # the next kernel reads it: no program has to wait for the memory of the others
    tl.atomic_max(bits, tl.max(size.to(tl.int32, bitcast=True), 0), sem="relaxed")


@triton.jit
def round_all(
    x, out, scale, bits, count, MOST: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count, other=0.0).to(tl.float32)
    largest = tl.load(bits).to(tl.float32, bitcast=True)
    # so torch divides a number by a tensor
    factor = MOST * tl.div_rn(1.0, tl.where(largest == 0, MOST, largest))
    factor = tl.where(factor > 3.4028234663852886e38, 3.4028234663852886e38, factor)
    rounded = (value * factor).to(FORMAT)
    tl.store(out + at, rounded.to(out.dtype.element_ty), at < count)
    if tl.program_id(0) == 0:
        tl.store(scale, factor)


def applies(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`quantize` can do this: 16 or 32 bits, stored by rows or by columns."""
    stored = x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous())
    return dtype in FORMATS and x.dtype in DTYPES and stored and 0 < x.numel() < LARGEST


def quantize(x: Tensor, dtype: torch.dtype, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """As ``nmrun.products.simulation.quantize``."""
    out = torch.empty_like(x, dtype=stored)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    most = torch.finfo(dtype).max
    with on(x):
        find_largest[grid](x, bits, x.numel(), BLOCK)
        round_all[grid](
            x, out, scale, bits, x.numel(), most, FORMATS[dtype], BLOCK, enable_fp_fusion=False
        )
    return out, scale
