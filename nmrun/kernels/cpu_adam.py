"""Adam's step on the CPU with what a recipe does around it in one pass: ``nm_adam.c``.

The arithmetic is that of ``torch.optim.Adam(fused=True)`` and of the recipes in torch, fused multiply-adds included: on x86 the same
bits, but for the last elements of a thread's part that fill no vector, which torch computes in double precision.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from nmrun.kernels import cpu
from nmrun.kernels.adam import Operands, WorkingCopy


def applies(weight: Tensor, copy: WorkingCopy) -> bool:
    """Whether there is a kernel for this weight (float32, stored without gaps)."""
    around, dim = copy.around, copy.dim
    if weight.shape[dim] % around.pattern.m or around.pattern.m > cpu.LARGEST_M or weight.numel() < cpu.SMALLEST:
        return False
    return cpu.load(around.pattern, around.factor != 0, adam=True) is not None


def step(p: Operands, scalars: list[float]) -> None:
    """Update weight and moments, write the working copy. ``scalars`` are those of ``nmrun.kernels.adam.scalars``."""
    around, dim, tensors = p.copy.around, p.copy.dim, p.all
    if not p.weight.is_contiguous():  # but channels last: that is what it looks like in memory
        tensors, dim = [t.permute(0, 2, 3, 1) for t in tensors], {0: 0, 1: 3}[dim]
    inner = tensors[0].shape[dim + 1 :].numel()
    rows = p.weight.numel() // (around.pattern.m * inner)
    decayed, spared, _, soft, _ = around.kind
    edit = 1 if decayed else 2 if spared else 0
    scale = 1.0 if around.scale is None else float(around.scale)
    values = (ctypes.c_float * (len(scalars) + 1))(*scalars, scale)
    addresses = [t.data_ptr() for t in tensors] + [around.mask.data_ptr() if around.mask is not None else 0]
    kernel = cpu.load(around.pattern, around.factor != 0, adam=True)
    assert kernel is not None  # applies() said so

    def part(begin: int, end: int) -> None:
        kernel.nm_adam(*addresses, begin, end, inner, values, edit, soft, p.frozen)

    cpu.in_parts(rows, p.weight.numel(), part)
