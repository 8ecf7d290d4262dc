"""Products with an N:M matrix on the CPU whose weights stay as they are: inference.

The layout is that of ``nm_token.c``: tiles of 16 rows, whose non-zeros lie side by side. One layout
serves a single token (``nm_token.c``, bound by reading the non-zeros) and thousands of them
(``nm_product.c``). A token has the same bits in whatever company it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.products import BLOCK, LOW, in_panels
from nmrun.fast.cpu.kernels.slots import in_order, start_of
from nmrun.kernels.compiler import BEGIN, END, address, in_parts

TILE = 16  # rows, and columns of a segment
SEGMENTS = BLOCK // TILE
FEW = 8  # tokens that nm_token.c takes; from about 12 on nm_product.c is faster
FEW_WORTH = 8  # its multiplications that cost as much as a weight in another pass, see in_parts
TILED, LOW_VALUES = 8, 16  # flags of nm_product.c


@dataclass(frozen=True)
class TiledMatrix:
    """A sparse matrix (rows, columns) in slots of 16 non-zeros, one of each row of a tile.

    Attributes:
        values: (slots, 16), float32 or bfloat16; zeros fill up rows that have fewer non-zeros.
        index: (slots, 16), uint8: their columns, counted from the block's first.
        counts: (blocks, tiles, 8), uint8: the slots of each segment of 16 columns.
        start: int32, (blocks * tiles + 1): their sums, see ``nm_token.c``.
        rows, columns: the shape.
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

    @classmethod
    def of(
        cls, values: Tensor, index: Tensor, counts: Tensor, rows: int, columns: int
    ) -> TiledMatrix:
        """Raises ValueError for tensors that hold no matrix of this shape."""
        blocks, tiles = -(-columns // BLOCK), -(-rows // TILE)
        shape, about = (blocks, tiles, SEGMENTS), f"{rows} x {columns}"
        start = start_of(values, index, counts, shape, TILE, about)
        # the columns that a segment has slots for: nothing outside of a block is read
        segment = torch.arange(counts.numel()).remainder_(SEGMENTS)
        if bool(
            (index // TILE != segment.repeat_interleave(counts.flatten().long())[:, None]).any()
        ):
            raise ValueError("a column that is not of its segment")
        values, index, counts = (t.contiguous() for t in (values, index, counts))
        return cls(values, index, counts, start, rows, columns)

    def dense(self) -> Tensor:
        """The matrix with its zeros, in the dtype of the values."""
        tiles = -(-self.rows // TILE)
        place = torch.arange(self.counts.numel() // SEGMENTS).repeat_interleave(self.start.diff())
        column = (place // tiles * BLOCK)[:, None] + self.index.long()
        row = (place % tiles * TILE)[:, None] + torch.arange(TILE)
        filled = self.values != 0
        out = torch.zeros(self.rows, self.columns, dtype=self.values.dtype)
        out[row[filled], column[filled]] = self.values[filled]
        return out


def pack(row: Tensor, column: Tensor, value: Tensor, rows: int, columns: int) -> TiledMatrix:
    """A matrix from its non-zeros, each (count,), in any order, none twice."""
    tiles, blocks = -(-rows // TILE), -(-columns // BLOCK)
    sides = (tiles * TILE, blocks * BLOCK)
    row, column, value, rank, filled = in_order(row, column, value, *sides, TILE)
    # the fullest row of a tile counts
    most = filled.unflatten(0, (tiles, TILE)).amax(1)
    counts = most.view(tiles, blocks, SEGMENTS).transpose(0, 1).contiguous()
    flat = counts.flatten()
    first = flat.cumsum(0) - flat
    place = (column // BLOCK * tiles + row // TILE) * SEGMENTS + column % BLOCK // TILE
    slots = int(flat.sum())
    position = (first[place] + rank) * TILE + row % TILE
    # an empty place reads the first column of its segment
    segment = torch.arange(len(flat)).remainder_(SEGMENTS).repeat_interleave(flat)
    index = (segment * TILE).to(torch.uint8)[:, None].repeat(1, TILE)
    values = value.new_zeros(slots, TILE)
    values.view(-1)[position] = value
    index.view(-1)[position] = (column % BLOCK).to(torch.uint8)
    return TiledMatrix.of(values, index, counts.to(torch.uint8), rows, columns)


def multiply(x: Tensor, matrix: TiledMatrix, bias: Tensor | None = None) -> Tensor:
    """``x S^T + bias`` with x (tokens, columns) in float32 or bfloat16 and the bias in float32; (tokens,
    rows) in the dtype of x, summed in float32."""
    library, x = products.KERNELS.load(), x.contiguous()
    tokens, rows, columns = len(x), matrix.rows, matrix.columns
    out = x.new_empty(tokens, rows)
    flags = LOW * (x.dtype == torch.bfloat16)
    flags += LOW_VALUES * (matrix.values.dtype == torch.bfloat16)
    parts = (matrix.values, matrix.index, matrix.start)
    if not tokens:
        return out
    bias = None if bias is None else bias.contiguous()
    fixed = [x.data_ptr(), out.data_ptr(), address(bias)]
    fixed += [part.data_ptr() for part in parts]
    size = (rows, columns, tokens)
    count = matrix.values.numel()
    if tokens <= FEW:
        counts = matrix.counts.data_ptr()
        operands = (*fixed, counts, *size, BEGIN, END, flags)
        in_parts(library.nm_token, operands, -(-rows // TILE), tokens * count // FEW_WORTH)
    else:
        in_panels(library.nm_product, (*fixed, *size), flags + TILED, tokens, rows, count)
    return out
