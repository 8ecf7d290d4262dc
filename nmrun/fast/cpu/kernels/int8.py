"""Products of int8 with an N:M matrix on the CPU, for inference: ``nm_int8.c``, whose layout this is.

Weights are symmetric by row, ``w = scale * q`` with q from -127 to 127. A token is quantised inside
the product, ``x = s * (q - z)`` with q from 0 to 255:

    s = max(x, 0) / 255 - min(x, 0) / 255,    z = round(-min(x, 0) * (1 / s)),    q = round(x * (1 / s)) + z
    y = (sum (q - z) w) * s * scale + bias

The sum is exact in 32 bits; all else is float32, in the order written, rounded to the nearest, ties
to even. So a token has the same bits in whatever batch it comes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels.slots import in_order, start_of
from nmrun.kernels.compiler import SAME_BITS, CFunctions, address, in_tokens_or_rows

TILE = 16  # rows, as in nm_int8.c
SEGMENT = 64  # columns
DEEP = SEGMENT // TILE  # non-zeros of a row in a slot
TOKENS_A_PASS = 16  # tokens that share a pass over the matrix
WORTH = 128  # multiplications that cost as much as a weight in another pass, see in_parts
ROW = (2**31 - 1) // (255 * 127)  # non-zeros that 32 bits can add up
KERNELS = CFunctions(
    "int8 products",
    ("nm_scratch", "nm_vectors", "nm_tiles", "nm_int8", "nm_block_int8"),
    (*SAME_BITS, "-Wno-psabi"),
    __package__,
    {"nm_int8": "p" * 10 + "n" * 6, "nm_block_int8": "p" * 10 + "n" * 5},
    needs="AVX-512 with VNNI and VBMI",
)


@dataclass(frozen=True)
class Int8Matrix:
    """A sparse matrix (rows, columns) of int8 in slots of 64 non-zeros, four of each row of a tile.

    Attributes:
        values: (slots, 64), int8; zeros fill up rows that have fewer non-zeros.
        index: (slots, 64), uint8: their columns, counted from the segment's first.
        counts: (tiles, segments), uint8: the slots of each segment of 64 columns.
        scales: (rows,), float32.
        start: int32, (tiles + 1): where a tile's slots begin.
        sums: int32, (tiles * 16): of the values of a row.
        rows, columns: the shape.
    """

    # what :meth:`of` takes, and what follows from these
    STORED: ClassVar[tuple[str, ...]] = ("values", "index", "counts", "scales")
    DERIVED: ClassVar[tuple[str, ...]] = ("start", "sums")

    values: Tensor
    index: Tensor
    counts: Tensor
    scales: Tensor
    start: Tensor
    sums: Tensor
    rows: int
    columns: int

    @classmethod
    def of(
        cls, values: Tensor, index: Tensor, counts: Tensor, scales: Tensor, rows: int, columns: int
    ) -> Int8Matrix:
        """Raises ValueError for tensors that hold no matrix of this shape."""
        tiles, segments = -(-rows // TILE), -(-columns // SEGMENT)
        shape, about = (tiles, segments), f"{rows} x {columns}"
        start = start_of(values, index, counts, shape, SEGMENT, about)
        if values.dtype != torch.int8 or scales.shape != (rows,) or scales.dtype != torch.float32:
            raise ValueError(
                f"{values.dtype} values with {list(scales.shape)} {scales.dtype} scales"
            )
        if bool((index >= SEGMENT).any()):
            raise ValueError("a column that is not of its segment")
        most = int(start.diff().max() if tiles else 0) * DEEP
        if most > ROW:
            raise ValueError(f"rows of {most} non-zeros: 32 bits add up {ROW}")
        slot_sums = values.view(-1, TILE, DEEP).sum(2, dtype=torch.int32)
        tile = torch.arange(tiles).repeat_interleave(start.diff())
        sums = torch.zeros(tiles, TILE, dtype=torch.int32).index_add_(0, tile, slot_sums).flatten()
        values, index, counts = (t.contiguous() for t in (values, index, counts))
        return cls(values, index, counts, scales.contiguous(), start, sums, rows, columns)

    def dense(self) -> Tensor:
        """The matrix with its zeros, float32."""
        tiles, segments = self.counts.shape
        place = torch.arange(tiles * segments).repeat_interleave(self.counts.flatten().long())
        column = (place % segments * SEGMENT)[:, None] + self.index.long()
        row = (place // segments * TILE)[:, None] + torch.arange(SEGMENT) // DEEP
        filled = self.values != 0
        out = torch.zeros(self.rows, self.columns)
        out[row[filled], column[filled]] = self.values[filled].float()
        return out * self.scales[:, None]


def quantised(row: Tensor, value: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Non-zeros as int8, and the scale of each of their rows; the arguments are those of :func:`pack`.
    Raises ValueError for values that are not finite."""
    value = value.float()
    if not bool(value.isfinite().all()):
        raise ValueError("int8: the weight has NaN or infinity")
    most = torch.zeros(rows).scatter_reduce_(0, row, value.abs(), "amax")
    scales = (most / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (value / scales[row]).round().clamp(-127, 127).to(torch.int8), scales


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8, with its zeros, and the scale of each row.

    Raises:
        ValueError: for values that are not finite.
    """
    row, column = weight.nonzero(as_tuple=True)
    value, scales = quantised(row, weight[row, column], len(weight))
    result = torch.zeros(weight.shape, dtype=torch.int8)
    result[row, column] = value
    return result, scales


def pack(
    row: Tensor, column: Tensor, value: Tensor, scales: Tensor, rows: int, columns: int
) -> Int8Matrix:
    """A matrix from its non-zeros as int8, each (count,), in any order, none twice; and the scales
    of its rows.
    """
    tiles, segments = -(-rows // TILE), -(-columns // SEGMENT)
    row, column, value, rank, filled = in_order(row, column, value, tiles * TILE, columns, SEGMENT)
    # the fullest row of a tile counts
    counts = -(-filled.unflatten(0, (tiles, TILE)).amax(1) // DEEP)
    flat = counts.flatten()
    first = (flat.cumsum(0) - flat)[row // TILE * segments + column // SEGMENT]
    position = (first + rank // DEEP) * SEGMENT + row % TILE * DEEP + rank % DEEP
    slots = int(flat.sum())
    values = torch.zeros(slots, SEGMENT, dtype=torch.int8)
    index = torch.zeros(slots, SEGMENT, dtype=torch.uint8)
    values.view(-1)[position] = value
    index.view(-1)[position] = (column % SEGMENT).to(torch.uint8)
    return Int8Matrix.of(values, index, counts.to(torch.uint8), scales, rows, columns)


def multiply(x: Tensor, matrix: Int8Matrix, bias: Tensor | None = None) -> Tensor:
    """``x S^T + bias``, all float32: x (tokens, columns), the result (tokens, rows).

    Raises RuntimeError for NaN and infinity in x, and where there are no such products.
    """
    library = KERNELS.load()
    x, (tokens, rows, columns) = x.contiguous(), (len(x), matrix.rows, matrix.columns)
    out = x.new_empty(tokens, rows)
    bias = None if bias is None else bias.contiguous()
    parts = (matrix.values, matrix.index, matrix.counts, matrix.start, matrix.scales, matrix.sums)
    odd = ctypes.c_int32(0)
    operands = [x.data_ptr(), out.data_ptr(), address(bias)]
    operands += [part.data_ptr() for part in parts]
    operands += [ctypes.addressof(odd), rows, columns]
    tiles, work = len(matrix.counts), tokens * matrix.values.numel() // WORTH
    in_tokens_or_rows(library.nm_int8, operands, tokens, tiles, work, TOKENS_A_PASS)
    if odd.value:
        raise RuntimeError("int8 products: the activations have NaN or infinity")
    return out
