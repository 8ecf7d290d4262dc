"""Products of bfloat16 with an N:M matrix on the CPU, by the instruction ``vdpbf16ps``: ``nm_bf16.c``,
whose layout this is.

Numbers are bfloat16, sums float32, and the bias is float32. In products subnormal numbers are zero.
The bits of a result depend on nothing but the operands, whatever the number of threads or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels.slots import start_of
from nmrun.kernels.compiler import (
    BEGIN,
    END,
    SAME_BITS,
    CFunctions,
    address,
    in_parts,
    in_tokens_or_rows,
)

TILE = 16  # rows, as in nm_bf16.c
SEGMENT = 32  # columns
SEGMENTS = 16  # of a block
BLOCK = SEGMENT * SEGMENTS
DEEP = SEGMENT // TILE  # non-zeros of a row in a slot
TOKENS_A_PASS = 16  # tokens that share a pass over the matrix
WORTH = 64  # multiplications that cost as much as a weight in another pass, see in_parts
KERNELS = CFunctions(
    "products of bfloat16",
    ("nm_scratch", "nm_vectors", "nm_bf16", "nm_window", "nm_bf16_convolution"),
    (*SAME_BITS, "-Wno-psabi"),
    __package__,
    {
        "nm_bf16": "p" * 7 + "n" * 6,
        "nm_bf16_count": "pi" + "n" * 5 + "pp",
        "nm_bf16_fill": "pi" + "n" * 5 + "p" * 4,
        "nm_bf16_convolution": "p" * 8 + "n" * 3,
        "nm_bf16_sampled": "p" * 6 + "n" * 5 + "pp",
    },
    needs="AVX-512 with BF16",
)


@dataclass(frozen=True)
class Bf16Matrix:
    """A sparse matrix (rows, columns) in slots of 32 non-zeros, two of each row of a tile; or one for
    each position of a convolution's kernel (tap), one after another.

    Attributes:
        values: (slots, 32), bfloat16; zeros fill up rows that have fewer non-zeros. There may be
            room behind them.
        index: (slots, 32), uint8: their columns, counted from the segment's first.
        counts: (blocks, tiles, 16), uint8: the slots of each segment of 32 columns; each tap has
            its own blocks.
        start: int32, (blocks * tiles + 1): where the slots of a tile in a block begin.
    """

    # what :meth:`of` takes, and what follows from these
    STORED: ClassVar[tuple[str, ...]] = ("values", "index", "counts")
    DERIVED: ClassVar[tuple[str, ...]] = ("start",)

    values: Tensor
    index: Tensor
    counts: Tensor
    start: Tensor
    rows: int
    columns: int
    taps: int = 1

    @classmethod
    def empty(cls, rows: int, columns: int, taps: int = 1) -> Bf16Matrix:
        """Memory for any matrix of this shape, of which only what is filled is ever touched; it
        holds none yet."""
        blocks, tiles = taps * -(-columns // BLOCK), -(-rows // TILE)
        slots = taps * tiles * -(-columns // SEGMENT) * TILE
        return cls(
            torch.empty(slots, SEGMENT, dtype=torch.bfloat16),
            torch.empty(slots, SEGMENT, dtype=torch.uint8),
            torch.zeros(blocks, tiles, SEGMENTS, dtype=torch.uint8),
            torch.zeros(blocks * tiles + 1, dtype=torch.int32),
            rows,
            columns,
            taps,
        )

    @classmethod
    def of(
        cls, values: Tensor, index: Tensor, counts: Tensor, rows: int, columns: int, taps: int = 1
    ) -> Bf16Matrix:
        """Raises ValueError for tensors that hold no matrix of this shape."""
        blocks, tiles = taps * -(-columns // BLOCK), -(-rows // TILE)
        shape, about = (blocks, tiles, SEGMENTS), f"{rows} x {columns}"
        start = start_of(values, index, counts, shape, SEGMENT, about)
        if values.dtype != torch.bfloat16:
            raise ValueError(f"values of {values.dtype}, not bfloat16")
        parts = (values.contiguous(), index.contiguous(), counts.contiguous(), start)
        matrix = cls(*parts, rows, columns, taps)
        _, _, column = matrix._places()
        # an empty place reads its segment's first column: nothing outside of x is read
        if bool((index >= SEGMENT).any()) or bool((column >= columns).any()):
            raise ValueError("a column that is not of its segment")
        return matrix

    @property
    def slots(self) -> int:
        """How many there are."""
        return int(self.start[-1])

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tap, the row and the column of each place, (slots, 32)."""
        tiles, blocks = -(-self.rows // TILE), -(-self.columns // BLOCK)
        segment = torch.arange(self.counts.numel()).repeat_interleave(self.counts.flatten().long())
        place = segment // SEGMENTS
        block = place // tiles
        first = block % blocks * BLOCK + segment % SEGMENTS * SEGMENT
        row = (place % tiles * TILE)[:, None] + torch.arange(SEGMENT) // DEEP
        tap = (block // blocks)[:, None].expand_as(row)
        return tap, row, first[:, None] + self.index[: self.slots].long()

    def dense(self) -> Tensor:
        """The matrix with its zeros, (rows, taps * columns), bfloat16."""
        (tap, row, column), values = self._places(), self.values[: self.slots]
        filled = values != 0
        out = torch.zeros(self.rows, self.taps * self.columns, dtype=torch.bfloat16)
        out[row[filled], (tap * self.columns + column)[filled]] = values[filled]
        return out


def pack(matrix: Tensor, into: Bf16Matrix, turned: bool = False) -> int:
    """Round a float32 matrix and pack it into memory of :meth:`Bf16Matrix.empty`: a matrix (rows, taps *
    columns) for ``into``, or ``turned`` one of (columns, taps * rows), of which the transpose of each
    tap is packed. Without taps it may be stored by columns.

    Returns how many non-zeros there are, rounded.
    """
    if not matrix.is_contiguous():
        matrix, turned = matrix.t().contiguous(), not turned
    library, size = KERNELS.load(), matrix.numel() // into.taps
    across, tiles = (into.rows if turned else into.columns), into.counts.shape[1]
    shape = (int(turned), matrix.shape[1], into.rows, into.columns, BEGIN, END)
    memory = (into.values.data_ptr(), into.index.data_ptr())
    nonzeros = torch.empty(into.taps, tiles, dtype=torch.int32)
    counts, starts = into.counts.chunk(into.taps), into.start[:-1].chunk(into.taps)
    sources = [matrix.data_ptr() + 4 * tap * across for tap in range(into.taps)]
    for tap, source in enumerate(sources):
        to = (counts[tap].data_ptr(), nonzeros[tap].data_ptr())
        in_parts(library.nm_bf16_count, (source, *shape, *to), tiles, size)
    into.start[1:] = into.counts.sum(2, dtype=torch.int32).flatten().cumsum(0)
    for tap, source in enumerate(sources):
        of = (counts[tap].data_ptr(), starts[tap].data_ptr())
        in_parts(library.nm_bf16_fill, (source, *shape, *of, *memory), tiles, size)
    return int(nonzeros.sum())


def pack_both(
    weight: Tensor, other: Tensor | None, forward: Bf16Matrix, backward: Bf16Matrix
) -> int:
    """As :func:`nmrun.fast.cpu.kernels.products.pack_both`; rounded."""
    pack(weight if other is None else other, backward, turned=True)
    return pack(weight, forward)


def packed(matrix: Tensor, taps: int = 1) -> Bf16Matrix:
    """A matrix (rows, taps * columns) with zeros, packed, without room behind it."""
    full = Bf16Matrix.empty(len(matrix), matrix.shape[1] // taps, taps)
    pack(matrix.float().contiguous(), full)
    return Bf16Matrix(
        full.values[: full.slots].clone(), full.index[: full.slots].clone(), full.counts,
        full.start, full.rows, full.columns, taps,
    )  # fmt: skip


def multiply(x: Tensor, matrix: Bf16Matrix, bias: Tensor | None = None) -> Tensor:
    """``x S^T + bias``, with x (tokens, columns) in bfloat16; (tokens, rows) in bfloat16, rounded once.
    Raises RuntimeError where there are no such products."""
    library, x = KERNELS.load(), x.contiguous()
    tokens, rows, columns = len(x), matrix.rows, matrix.columns
    out = x.new_empty(tokens, rows)
    bias = None if bias is None else bias.float().contiguous()
    operands = [x.data_ptr(), out.data_ptr(), address(bias)]
    operands += [*_addresses(matrix), rows, columns]
    tiles, work = matrix.counts.shape[1], tokens * matrix.values.numel() // WORTH
    in_tokens_or_rows(library.nm_bf16, operands, tokens, tiles, work, TOKENS_A_PASS)
    return out


def convolve(
    x: Tensor, out: Tensor, bias: Tensor | None, matrix: Bf16Matrix, geometry: int
) -> None:
    """See :func:`nmrun.fast.cpu.kernels.convolution.convolve`: images in bfloat16, channels last, a bias
    in float32, and where a ``Geometry`` lies."""
    pixels = out.shape[0] * out.shape[2] * out.shape[3]
    operands = [x.data_ptr(), out.data_ptr(), address(bias)]
    operands += [*_addresses(matrix), geometry, x.shape[0]]
    work = pixels * matrix.slots * SEGMENT // WORTH
    in_parts(
        KERNELS.load().nm_bf16_convolution, (*operands, BEGIN, END), pixels, work, TOKENS_A_PASS
    )


def sampled(x: Tensor, y: Tensor, mask: Bf16Matrix) -> Tensor:
    """``y^T x`` where ``mask`` (rows, columns) has non-zeros, zero elsewhere, in float32; x (tokens,
    columns) and y (tokens, rows) in bfloat16.
    """
    library, x, y = KERNELS.load(), x.contiguous(), y.contiguous()
    sums, out = torch.zeros(mask.slots, SEGMENT), torch.zeros(mask.rows, mask.columns)
    operands = [x.data_ptr(), y.data_ptr(), *_addresses(mask), mask.rows, mask.columns, len(x)]
    tiles = mask.counts.shape[1]
    to = (BEGIN, END, sums.data_ptr(), out.data_ptr())
    in_parts(library.nm_bf16_sampled, (*operands, *to), tiles, len(x) * sums.numel() // WORTH)
    return out


def _addresses(matrix: Bf16Matrix) -> list[int]:
    parts = (matrix.values, matrix.index, matrix.counts, matrix.start)
    return [part.data_ptr() for part in parts]
