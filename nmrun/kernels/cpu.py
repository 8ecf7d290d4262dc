"""Projections, Adam's step with a rule, and sums over masks on the CPU: the C files of this package, built
for one N:M (:mod:`nmrun.kernels.compiler`) and called through ctypes.

Building takes about 0.5 s, with the step of Adam 1.8 s, and happens once a pattern and machine.
Without a compiler everything still works, through the torch reference, and gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from nmrun.kernels.compiler import BEGIN, END, CFunctions, in_parts
from nmrun.kernels.layout import as_stored, filled, has_memory, stored_alike
from nmrun.kernels.operands import Operands
from nmrun.patterns import Pattern

# gcc's own fusing would change bits
FLAGS = ("-ffp-contract=off", "-fno-math-errno")
# weights; below this the reference takes 0.1 ms a step and a first build 3,000 steps to pay back
SMALLEST = 1 << 12
LARGEST_M = (
    256  # the working set of a column block must stay in the first-level cache and the code small
)


def project(
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    soft: bool = False,
    scale: float = 1.0,
    factor: float = 0.0,
) -> bool:
    """Write the N:M projection of ``weight`` into ``out``, or return False where this kernel does
    not apply. Hard threshold by default, ``scale * soft threshold`` with ``soft``; of a hard
    one, pruned weights are kept ``factor`` times. Applies to float32 CPU tensors of at least
    ``SMALLEST`` elements, contiguous or both with channels last, for M up to ``LARGEST_M``."""
    if not takes(pattern, weight, out) or (kernel := load(pattern, factor != 0)) is None:
        return False
    numbers = (ctypes.c_float * 2)(scale, factor)
    more = (int(soft), ctypes.addressof(numbers))
    _by_columns(kernel.nm_project, weight, out, pattern, dim, more)
    return True


def mask(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Write the N:M mask of ``weight`` into ``out`` (bool): else as :func:`project`."""
    if not (takes(pattern, weight) and stored_alike(weight, out)):
        return False
    if (kernel := load(pattern)) is None:
        return False
    _by_columns(kernel.nm_mask, weight, out, pattern, dim)
    return True


def _by_columns(
    kernel: Callable[..., int],
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    more: Sequence[int] = (),
) -> None:
    """Call a kernel for all groups; ``more`` are its operands behind the usual ones."""
    dim, (weight, out) = as_stored(dim, weight, out)
    whole = filled(weight, pattern, dim)
    result = out if whole is weight else torch.empty_like(whole, dtype=out.dtype)
    inner = whole.shape[dim + 1 :].numel()
    operands = (whole.data_ptr(), result.data_ptr(), BEGIN, END, inner, *more)
    in_parts(kernel, operands, whole.numel() // pattern.m, whole.numel())
    if result is not out:
        out.copy_(result.narrow(dim, 0, out.shape[dim]))


def project_rows(weight: Tensor, out: Tensor, pattern: Pattern, order: Tensor) -> bool:
    """The projection of ``weight`` along dimension 0, as if its rows stood in ``order`` (int64), to
    whole groups: else as :func:`project`."""
    fits = (
        takes(pattern, weight, out)
        and len(order) == len(weight)
        and len(weight) % pattern.m == 0
        and order.is_contiguous()
    )
    if not fits or (kernel := load(pattern)) is None:
        return False
    _, (weight, out) = as_stored(0, weight, out)
    addresses = [t.data_ptr() for t in (weight, out, order)]
    operands = (*addresses, BEGIN, END, weight[0].numel())
    in_parts(kernel.nm_project_rows, operands, len(weight) // pattern.m, weight.numel())
    return True


def takes(pattern: Pattern, *tensors: Tensor) -> bool:
    """Whether these kernels are for tensors of one shape and this pattern: float32, on the CPU,
    enough weights, stored alike, with memory."""
    large = tensors[0].numel() >= SMALLEST and pattern.m <= LARGEST_M
    return (
        large
        and pattern.v == 1
        and all(t.is_cpu and t.dtype == torch.float32 for t in tensors)
        and has_memory(tensors[0])
        and stored_alike(*tensors)
    )


@cache
def load(pattern: Pattern, fades: bool = False, adam: bool = False) -> ctypes.CDLL | None:
    """The library for this pattern, built if needed, ``fades`` with a factor for pruned weights;
    None where no C compiler works."""
    names = ("nm_project", "nm_adam") if adam else ("nm_project",)
    flags = (*FLAGS, f"-DN={pattern.n}", f"-DM={pattern.m}", f"-DFADES={int(fades)}")
    functions = {
        "nm_project": "ppnnnip",
        "nm_mask": "ppnnn",
        "nm_project_rows": "pppnnn",
        "nm_adam": "p" * 6 + "nnn" + "p" + "iii",  # with ``adam`` alone
    }
    kernels = CFunctions(f"projection to {pattern}", names, flags, "nmrun.kernels", functions)
    return None if kernels.obstacle() else kernels.load()


def takes_step(o: Operands) -> bool:
    pattern, dense = o.update.pattern, o.update.dense
    whole = dense.shape[o.update.dim] % pattern.m == 0
    return whole and takes(pattern, *o.all) and _of_step(o) is not None


def step_adam(o: Operands, scalars: list[float]) -> None:
    """Update weight and moments, write the projection: ``nm_adam.c``, with the numbers of
    :func:`nmrun.kernels.operands.scalars`. The arithmetic is that of
    ``torch.optim.Adam(fused=True)`` and of the recipes in torch, fused multiply-adds included.
    On x86 the bits are the same, but for the last elements of a thread's part that fill no
    vector: torch computes those in double precision."""
    update, kernel = o.update, _of_step(o)
    assert kernel is not None  # takes_step() said so
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


def _of_step(o: Operands) -> ctypes.CDLL | None:
    return load(o.update.pattern, o.update.rule.pruned_weight_factor != 0, adam=True)


SPLIT_PIECE = 4096  # entries, as in nm_split.c
SPLIT_SMALLEST = 1 << 16  # entries; below, torch takes less than building pays back
SPLIT = CFunctions("sums over a mask", ("nm_split",), (), "nmrun.kernels", {"nm_split": "ppnnnip"})


def split(values: Tensor, mask: Tensor, squares: bool) -> Tensor | None:
    """The sums of values, or of their squares, over the kept and over the pruned entries, on the
    CPU in one pass. (2,), float64: the same bits on any number of threads. None where this
    kernel does not apply: another dtype than float32 and bool, small tensors, stored in
    different orders, no C compiler."""
    fits = values.is_cpu and mask.is_cpu and values.dtype == torch.float32
    if not fits or values.numel() < SPLIT_SMALLEST or not stored_alike(values, mask):
        return None
    if SPLIT.obstacle():
        return None
    _, (values, mask) = as_stored(0, values, mask)
    count = values.numel()
    pieces = -(-count // SPLIT_PIECE)
    sums = torch.empty(pieces, 2, dtype=torch.float64)
    tensors = (values.data_ptr(), mask.data_ptr(), count)
    operands = (*tensors, BEGIN, END, int(squares), sums.data_ptr())
    in_parts(SPLIT.load().nm_split, operands, pieces, count)
    return sums.sum(0)
