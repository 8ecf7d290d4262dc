"""Projections and Adam's step with a rule on the CPU: the C files of this package, built
for one N:M (:mod:`nmrun.kernels.compiler`) and called through ctypes.

Building takes about a second, and happens once a pattern and machine.
Without a compiler everything still works, through the torch reference, and gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from nmrun.kernels.compiler import BEGIN, END, SAME_BITS, CFunctions, in_parts
from nmrun.kernels.layout import Operands, as_stored, filled, has_memory, stored_alike
from nmrun.patterns import Pattern

# if numbers could trap, gcc would not vectorise conditions on them
FLAGS = (*SAME_BITS, "-fno-trapping-math")
# weights; below this the reference takes 0.1 ms a step and a first build 3,000 steps to pay back
SMALLEST = 1 << 12
LARGEST_M = (
    256  # the working set of a column block must stay in the first-level cache and the code small
)
LARGEST_BLOCK = 1 << 14  # elements, as in nm_blocks.c
ADAM = CFunctions("Adam's step", ("nm_adam",), FLAGS, __package__, {"nm_adam": "p" * 6 + "npii"})


def project(
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    soft: bool = False,
    scale: float = 1.0,
    factor: float = 0.0,
) -> bool:
    """Write the projection of ``weight`` into ``out``, or return False where this kernel does not
    apply. Hard threshold by default, ``scale * soft threshold`` with ``soft``; of a hard one,
    pruned weights are kept ``factor`` times. Applies to float32 CPU tensors of at least
    ``SMALLEST`` elements, contiguous or both with channels last, for M up to ``LARGEST_M``. Of
    V:N:M patterns there is no soft threshold."""
    if not takes(pattern, dim, weight, out) or (kernel := load(pattern, factor != 0)) is None:
        return False
    numbers = (ctypes.c_float * 2)(factor, scale)
    at = ctypes.addressof(numbers)
    if pattern.v == 1:
        _by_steps(kernel.nm_project, weight, out, pattern, dim, (int(soft), at))
    elif soft:
        return False
    else:
        _by_steps(kernel.nm_project_blocks, weight, out, pattern, dim, (at,))
    return True


def mask(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Write the N:M mask of ``weight`` into ``out`` (bool): else as :func:`project`."""
    if not (takes(pattern, dim, weight) and stored_alike(weight, out)):
        return False
    if (kernel := load(pattern)) is None:
        return False
    function = kernel.nm_mask if pattern.v == 1 else kernel.nm_mask_blocks
    _by_steps(function, weight, out, pattern, dim)
    return True


def _by_steps(
    kernel: Callable[..., int],
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    more: Sequence[int] = (),
) -> None:
    """Call a kernel for all groups, or blocks; ``more`` are its operands behind the usual ones."""
    inner, gap = strides(weight, pattern, dim)
    dim, (weight, out) = as_stored(dim, weight, out)
    whole = filled(weight, pattern, dim)
    if gap and dim:  # the outputs' rows are as long as the filled weight's
        gap = whole[0].numel()
    result = out if whole is weight else torch.empty_like(whole, dtype=out.dtype)
    step = max(pattern.v * gap, pattern.m * inner) if gap else pattern.m
    operands = (whole.data_ptr(), result.data_ptr(), BEGIN, END, inner, *filter(None, [gap]), *more)
    in_parts(kernel, operands, whole.numel() // step, whole.numel())
    if result is not out:
        out.copy_(result.narrow(dim, 0, out.shape[dim]))


def strides(weight: Tensor, pattern: Pattern, dim: int) -> tuple[int, int]:
    """How far apart neighbours of a group lie, and the outputs of a block, in a weight that is
    stored without gaps; 0 where there are no blocks. Outputs are dimension 0, or 1 where groups
    run along that one."""
    at, (stored,) = as_stored(dim, weight)
    inner = stored.shape[at + 1 :].numel()
    if pattern.v == 1:
        return inner, 0
    outputs, _ = as_stored(0 if dim else 1, weight)
    return inner, stored.shape[outputs + 1 :].numel()


def project_rows(weight: Tensor, out: Tensor, pattern: Pattern, order: Tensor) -> bool:
    """The projection of ``weight`` along dimension 0, as if its rows stood in ``order`` (int64), to
    whole groups: else as :func:`project`."""
    fits = (
        pattern.v == 1
        and takes(pattern, 0, weight, out)
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


def takes(pattern: Pattern, dim: int, *tensors: Tensor) -> bool:
    """Whether these kernels are for tensors of one shape and this pattern: float32, on the CPU,
    enough weights, stored alike, with memory; and of V:N:M whole blocks that are not too large."""
    first = tensors[0]
    return (
        first.numel() >= SMALLEST
        and pattern.m <= LARGEST_M
        and all(t.is_cpu and t.dtype == torch.float32 for t in tensors)
        and has_memory(first)
        and stored_alike(*tensors)
        and (pattern.v == 1 or _has_blocks(pattern, dim, first))
    )


def _has_blocks(pattern: Pattern, dim: int, weight: Tensor) -> bool:
    if weight.dim() < 2 or weight.shape[0 if dim else 1] % pattern.v:
        return False
    inner, gap = strides(weight, pattern, dim)
    lines = pattern.m * inner if inner <= gap else 0
    return max(lines, pattern.v * pattern.m) <= LARGEST_BLOCK


@cache
def load(pattern: Pattern, fades: bool = False) -> ctypes.CDLL | None:
    """The library for this pattern, built if needed, ``fades`` with a factor for pruned weights;
    None where no C compiler works."""
    flags = [*FLAGS, f"-DN={pattern.n}", f"-DM={pattern.m}", f"-DFADES={int(fades)}"]
    if pattern.v == 1:
        name = "nm_project"
        functions = {name: "ppnnnip", "nm_mask": "ppnnn", "nm_project_rows": "pppnnn"}
    else:
        name = "nm_blocks"
        flags.append(f"-DV={pattern.v}")
        functions = {"nm_project_blocks": "ppnnnnp", "nm_mask_blocks": "ppnnnn"}
    functions["nm_step"] = "p" * 7 + "nnnn" + "piiip"
    kernels = CFunctions(
        f"projection to {pattern}", (name,), tuple(flags), "nmrun.kernels", functions
    )
    return None if kernels.obstacle() else kernels.load()


def takes_step(o: Operands) -> bool:
    pattern, dense = o.update.pattern, o.update.dense
    whole = dense.shape[o.update.dim] % pattern.m == 0
    takes_it = whole and takes(pattern, o.update.dim, *o.all)
    return takes_it and _of_step(o) is not None and not ADAM.obstacle()


def step_adam(o: Operands, scalars: list[float]) -> None:
    """Update weight and moments, write the projection: ``nm_adam.c``, with the numbers of
    :func:`nmrun.kernels.layout.scalars`. The arithmetic is that of
    ``torch.optim.Adam(fused=True)`` and of the recipes in torch, fused multiply-adds included.
    On x86 the bits are the same, but for the last elements of a thread's part that fill no
    vector: torch computes those in double precision."""
    update, kernel = o.update, _of_step(o)
    assert kernel is not None  # takes_step() said so
    rule, pattern = update.rule, update.pattern
    _, tensors = as_stored(update.dim, *o.all)
    inner, gap = strides(update.dense, pattern, update.dim)
    rows = update.dense.numel() // max(pattern.m * inner, pattern.v * gap)
    decays, scales, _, soft, _ = rule.kind
    edit = 1 if decays else 2 if scales else 0  # as nm_adam.c has them; so are the values in order
    *values, factor = scalars
    of_adam = (ctypes.c_float * len(values))(*values)
    scale = 1.0 if rule.soft_threshold_scale is None else float(rule.soft_threshold_scale)
    of_projection = (ctypes.c_float * 2)(factor, scale)
    mask = 0 if rule.mask is None else rule.mask.data_ptr()
    addresses = [ADAM.address, *(tensor.data_ptr() for tensor in tensors), mask]
    flags = (edit, int(o.frozen), int(soft))
    numbers = (ctypes.addressof(of_adam), *flags, ctypes.addressof(of_projection))
    operands = (*addresses, BEGIN, END, inner, gap, *numbers)
    in_parts(kernel.nm_step, operands, rows, update.dense.numel())


def _of_step(o: Operands) -> ctypes.CDLL | None:
    return load(o.update.pattern, o.update.rule.pruned_weight_factor != 0)
