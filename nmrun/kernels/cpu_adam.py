"""Adam's step on the CPU with what a recipe does around it in one pass: ``nm_adam.c``.

The arithmetic is that of ``torch.optim.Adam(fused=True)`` and of the recipes in torch, fused
multiply-adds included: on x86 the same bits, but for the last elements of a thread's part that fill
no vector, which torch computes in double precision.
"""

from __future__ import annotations

import ctypes

from nmrun.kernels import cpu
from nmrun.kernels.compiler import BEGIN, END, in_parts
from nmrun.kernels.layout import as_stored
from nmrun.kernels.operands import Operands


def supports(o: Operands) -> bool:
    pattern, dense = o.update.pattern, o.update.dense
    whole = dense.shape[o.update.dim] % pattern.m == 0
    return whole and cpu.takes(pattern, *o.all) and _library(o) is not None


def step(o: Operands, scalars: list[float]) -> None:
    """Update weight and moments, write the projection. ``scalars`` are those of
    :func:`nmrun.kernels.operands.scalars`."""
    update, kernel = o.update, _library(o)
    assert kernel is not None  # supports() said so
    rule, pattern = update.rule, update.pattern
    dim, tensors = as_stored(update.dim, *o.all)
    inner = tensors[0].shape[dim + 1 :].numel()
    rows = update.dense.numel() // (pattern.m * inner)
    decays, scales, _, soft, _ = rule.kind
    edit = 1 if decays else 2 if scales else 0  # as nm_adam.c has them; so are the values in order
    scale = 1.0 if rule.soft_threshold_scale is None else float(rule.soft_threshold_scale)
    values = (ctypes.c_float * (len(scalars) + 1))(*scalars, scale)
    addresses = [t.data_ptr() for t in tensors]
    addresses.append(0 if rule.mask is None else rule.mask.data_ptr())
    flags = (edit, int(soft), int(o.frozen))
    operands = (*addresses, BEGIN, END, inner, ctypes.addressof(values), *flags)
    in_parts(kernel.nm_adam, operands, rows, update.dense.numel())


def _library(o: Operands) -> ctypes.CDLL | None:
    return cpu.load(o.update.pattern, o.update.rule.pruned_weight_factor != 0, adam=True)
