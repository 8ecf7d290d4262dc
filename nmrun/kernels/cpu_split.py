"""Sums over the kept and over the pruned entries of a tensor on the CPU, in one pass: ``nm_split.c``."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nmrun.kernels import compiler
from nmrun.kernels.compiler import BEGIN, END, in_parts
from nmrun.kernels.layout import as_stored, stored_alike

PIECE = 4096  # entries, as in nm_split.c
SMALLEST = 1 << 16  # entries; below, torch takes less than building pays back


def split(values: Tensor, mask: Tensor, squares: bool) -> Tensor | None:
    """The sums of values, or of their squares, over the kept and over the pruned entries, on the
    CPU in one pass. (2,), float64: the same bits on any number of threads. None where this
    kernel does not apply: another dtype than float32 and bool, small tensors, stored in
    different orders, no C compiler."""
    fits = values.is_cpu and mask.is_cpu and values.dtype == torch.float32
    if not fits or values.numel() < SMALLEST or not stored_alike(values, mask):
        return None
    if (kernel := _library()) is None:
        return None
    _, (values, mask) = as_stored(0, values, mask)
    count = values.numel()
    pieces = -(-count // PIECE)
    sums = torch.empty(pieces, 2, dtype=torch.float64)
    tensors = (values.data_ptr(), mask.data_ptr(), count)
    operands = (*tensors, BEGIN, END, int(squares), sums.data_ptr())
    in_parts(kernel.nm_split, operands, pieces, count)
    return sums.sum(0)


@cache
def _library() -> ctypes.CDLL | None:
    library = compiler.library("nm_split", ("nm_split",))
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.nm_split.argtypes = [*[pointer] * 2, *[size] * 3, ctypes.c_int, pointer]
    return library
