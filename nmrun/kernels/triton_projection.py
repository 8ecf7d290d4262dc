"""N:M projections on CUDA devices, in Triton: one weight or all weights in a launch, with the bits
of ``nmrun.sparsity.reference``.

16-bit weights are made float32 as soon as they are read: arithmetic on them is then the same on
every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.triton_groups import (
    MODES,
    Launches,
    applies,
    locate,
    on,
    pointer,
    project_tile,
    select,
    shape_of,
)
from nmrun.patterns import Pattern


@triton.jit
def _tile(
    block, weight, out, scale, amount, columns, inner, size,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDED: tl.constexpr, SHORT: tl.constexpr, WIDE: tl.constexpr,
    MODE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    offset, exists, j = locate(block, columns, inner, size, M, P, COLUMNS, STRIDED, SHORT, WIDE)
    w = tl.load(weight + offset, exists, other=0.0).to(tl.float32)
    mask, shift = select(w, j, N, M, COLUMNS, STRIDED, SHORT)
    if SCALED:
        amount = tl.load(scale).to(tl.float32)
    value = project_tile(w, mask, shift, amount, MODE, weight.dtype.element_ty)
    tl.store(out + offset, value.to(out.dtype.element_ty), exists)


@triton.jit(do_not_specialize=["columns", "inner", "size"])
def project_one(
    weight, out, scale, amount, columns, inner, size,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDED: tl.constexpr, SHORT: tl.constexpr, WIDE: tl.constexpr,
    MODE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    _tile(
        tl.program_id(0), weight, out, scale, amount, columns, inner, size,
        N, M, P, COLUMNS, STRIDED, SHORT, WIDE, MODE, SCALED,
    )  # fmt: skip


@triton.jit
def project_many(
    table, owner,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDED: tl.constexpr, SHORT: tl.constexpr, WIDE: tl.constexpr,
    WEIGHT: tl.constexpr, OUT: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The projections of all weights of a table: ``owner`` has the row of each program."""
    program = tl.program_id(0)
    row = table + tl.load(owner + program) * FIELDS
    block = program - tl.load(row + 3).to(tl.int32)
    weight, out = pointer(row, 4, WEIGHT), pointer(row, 5, OUT)
    columns, inner, size = (
        tl.load(row).to(tl.int32),
        tl.load(row + 1).to(tl.int32),
        tl.load(row + 2).to(tl.int32),
    )
    _tile(
        block, weight, out, weight, 1.0, columns, inner, size,
        N, M, P, COLUMNS, STRIDED, SHORT, WIDE, 0, False,
    )  # fmt: skip


def project(
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    mode: str = "hard",
    amount: float = 1.0,
    scale: Tensor | None = None,
) -> bool:
    """Write the projection of ``weight`` into ``out``, without waiting for the device; False where
    these kernels do not apply. mode: ``hard``; ``soft``, times ``amount`` or ``scale``
    (0-dimensional, on the device); ``decayed``: ``w * (m + (1 - m) * amount)``; ``mask``: ones
    where weights are kept. Applies to float32, bfloat16 and float16 tensors of fewer than 2^30
    weights, all contiguous or all with their channels last, and M up to 64."""
    dim %= max(1, weight.dim())
    if not applies(weight, out, pattern, dim) or (
        scale is not None and scale.device != weight.device
    ):
        return False
    sizes, programs, constants = shape_of(weight, pattern, dim)
    with on(weight):
        project_one[(programs,)](
            weight, out, scale, float(amount), *sizes, **constants, MODE=MODES[mode], SCALED=scale is not None,
            enable_fp_fusion=False,
        )  # fmt: skip
    return True


def fits(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Whether a :class:`Batch` can take this weight."""
    return applies(weight, out, pattern, dim % max(1, weight.dim())) and not any(
        t.data_ptr() % 16 for t in (weight, out)
    )


class Batch:
    """Keeps the N largest of many weights in as few launches as they allow."""

    def __init__(self) -> None:
        self.launches = Launches()

    def project(self, batch: Sequence[tuple[Tensor, Tensor, Pattern, int]]) -> None:
        """Project weights, each with ``out``, ``pattern`` and ``dim`` of :func:`project`. Raises
        ValueError where the kernels do not apply to one, and where one does not begin at a multiple
        of 16 bytes."""
        for launch in self.launches.of(batch):
            rows = launch.rows([batch[i][:2] for i in launch.members])
            with on(rows):
                project_many[(launch.programs,)](
                    rows,
                    launch.owner,
                    **launch.constants,
                    FIELDS=rows.shape[1],
                    enable_fp_fusion=False,
                )
