"""Adam's step on the CPU with what a recipe does around it in one pass: ``nm_adam.c``.

The arithmetic is that of ``torch.optim.Adam(fused=True)`` and of the recipes in torch, fused multiply-adds included: on x86 the same
bits, but for the last elements of a thread's part that fill no vector, which torch computes in double precision.
"""

from __future__ import annotations

import ctypes

from nmrun.kernels import as_stored, cpu
from nmrun.kernels.adam import Operands


def applies(p: Operands) -> bool:
    """Whether there is a kernel for this weight."""
    pattern = p.copy.around.pattern
    return p.weight.shape[p.copy.dim] % pattern.m == 0 and cpu.takes(pattern, *p.all) and _library(p) is not None


def step(p: Operands, scalars: list[float]) -> None:
    """Update weight and moments, write the working copy. ``scalars`` are those of ``nmrun.kernels.adam.scalars``."""
    around, kernel = p.copy.around, _library(p)
    assert kernel is not None  # applies() said so
    dim, tensors = as_stored(p.copy.dim, *p.all)
    inner = tensors[0].shape[dim + 1 :].numel()
    rows = p.weight.numel() // (around.pattern.m * inner)
    decayed, spared, _, soft, _ = around.kind
    edit = 1 if decayed else 2 if spared else 0  # as nm_adam.c has them; so are the values in their order
    scale = 1.0 if around.scale is None else float(around.scale)
    values = (ctypes.c_float * (len(scalars) + 1))(*scalars, scale)
    addresses = [t.data_ptr() for t in tensors] + [around.mask.data_ptr() if around.mask is not None else 0]

    def part(begin: int, end: int) -> None:
        kernel.nm_adam(*addresses, begin, end, inner, values, edit, soft, p.frozen)

    cpu.in_parts(rows, p.weight.numel(), part)


def _library(p: Operands) -> ctypes.CDLL | None:
    return cpu.load(p.copy.around.pattern, p.copy.around.factor != 0, adam=True)
