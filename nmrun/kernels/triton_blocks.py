"""V:N:M projections on CUDA devices, in Triton, with the bits of ``nmrun.sparsity.reference``.

A program has a few blocks side by side: it adds up the magnitudes of V rows, in the reference's
order and in float64, keeps four columns of each block, and then N of these in each row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.triton_groups import MODES, on, project_tile, readable
from nmrun.patterns import COLUMNS, Pattern

TILE = 512  # weights of a row that a program has
LARGEST_M = 256


@triton.jit
def _largest(size, left, j, COUNT: tl.constexpr, P: tl.constexpr):
    """The COUNT largest of each row among those that are ``left``; ties keep the lower index."""
    kept = j < 0
    for _ in tl.static_range(COUNT):
        rest = tl.where(left & ~kept, size, float("-inf"))
        best = tl.max(rest, 1, keep_dims=True)
        first = tl.min(tl.where((rest == best) & left & ~kept, j, P), 1, keep_dims=True)
        kept = kept | (j == first)
    return kept


@triton.jit
def project_blocks(
    weight, out, amount, groups, columns,
    V: tl.constexpr, N: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(groups, GROUPS)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    group = tile * GROUPS + tl.arange(0, GROUPS)[:, None]
    j = tl.arange(0, P)[None, :]
    exists = (group < groups) & (j < M)
    offset = block * V * columns + group * M + j
    total = tl.zeros((GROUPS, P), tl.float64)
    for row in range(V):
        w = tl.load(weight + offset + row * columns, exists, other=0.0).to(tl.float32)
        total += tl.where(w == w, tl.abs(w), -1.0).to(tl.float64)
    shared = _largest(total, exists, j, COLUMNS, P)
    for row in range(V):
        w = tl.load(weight + offset + row * columns, exists, other=0.0).to(tl.float32)
        size = tl.where(w == w, tl.abs(w), -1.0)
        mask = _largest(size, shared, j, N, P) | (w != w)
        value = project_tile(w, mask, w, amount, MODE, weight.dtype.element_ty)
        tl.store(out + offset + row * columns, value.to(out.dtype.element_ty), exists)


def project(
    weight: Tensor, out: Tensor, pattern: Pattern, dim: int, mode: str = "hard", amount: float = 1.0
) -> bool:
    """Write the projection of a weight (outputs, inputs) into ``out``, modes as of
    :func:`nmrun.kernels.triton_projection.project`; False where this kernel does not apply: to other
    shapes, a soft threshold, groups that are cut short, and M above 256."""
    if not applies(weight, out, pattern, dim) or mode == "soft":
        return False
    rows, columns = weight.shape
    groups, constants = columns // pattern.m, constants_of(pattern)
    with on(weight):
        project_blocks[(rows // pattern.v * triton.cdiv(groups, constants["GROUPS"]),)](
            weight, out, float(amount), groups, columns, **constants, MODE=MODES[mode], enable_fp_fusion=False,
        )  # fmt: skip
    return True


def constants_of(pattern: Pattern) -> dict[str, int]:
    """The kernel's constants but MODE."""
    width = triton.next_power_of_2(pattern.m)
    return {
        "V": pattern.v, "N": pattern.n, "M": pattern.m, "P": width,
        "GROUPS": max(1, TILE // width), "COLUMNS": COLUMNS,
    }  # fmt: skip


def applies(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Whether this kernel can read ``weight`` and write ``out``."""
    return (
        readable(weight, out)
        and weight.dim() == 2
        and dim % 2 == 1
        and pattern.v > 1
        and pattern.m <= LARGEST_M
        and not weight.shape[0] % pattern.v
        and not weight.shape[1] % pattern.m
        and weight.is_contiguous()
        and out.is_contiguous()
    )
