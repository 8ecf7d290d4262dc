"""Products with an N:M matrix on the CPU whose weights stay as they are: inference.

The layout is that of ``nm_token.c``: tiles of 16 rows, whose non-zeros lie side by side. One layout
serves a single token (``nm_token.c``, bound by reading the non-zeros) and thousands of them
(``nm_product.c``). A token has the same bits in whatever company it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.matrix import Matrix
from nmrun.fast.cpu.kernels.products import BLOCK, LOW, in_panels
from nmrun.kernels.compiler import BEGIN, END, address, in_parts

TILE = 16  # rows
FEW = 8  # tokens that nm_token.c takes; from about 12 on nm_product.c is faster
FEW_WORTH = 8  # its multiplications that cost as much as a weight in another pass, see in_parts
TILED, LOW_VALUES = 8, 16  # flags of nm_product.c


class SlotMatrix(Matrix):
    """A sparse matrix in tiles of 16 rows. A tile's segment of columns has as many slots as its fullest
    row needs. A slot holds ``DEEP`` non-zeros of each row of its tile.

    Attributes:
        values: (slots, SEGMENT); zeros fill up rows that have fewer non-zeros. There may be room behind
            them.
        index: (slots, SEGMENT), uint8: their columns, counted from the segment's first.
        counts: (blocks, tiles, SEGMENTS), uint8: the slots of each segment; each tap has its own blocks.
        start: int32, (blocks * tiles + 1): where the slots of a tile in a block begin.
    """

    SEGMENT: ClassVar[int]  # columns
    SEGMENTS: ClassVar[int]  # of a block; 0 for a single block with all
    FROM_BLOCK: ClassVar[bool] = False  # columns are counted from the block's first

    @classmethod
    def cut(cls, rows: int, columns: int, taps: int = 1) -> tuple[int, ...]:
        """The shape of the counts."""
        tiles, segments = -(-rows // TILE), -(-columns // cls.SEGMENT)
        if not cls.SEGMENTS:
            return tiles, segments
        return taps * -(-segments // cls.SEGMENTS), tiles, cls.SEGMENTS

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        values, index, counts = stored[:3]
        if counts.shape != cls.cut(rows, columns, taps) or counts.dtype != torch.uint8:
            raise ValueError(f"counts {list(counts.shape)} are not those of {rows} x {columns}")
        of_tiles = counts.sum(-1, dtype=torch.int64).flatten()
        start = functional.pad(of_tiles.cumsum(0), (1, 0)).int()
        slots = (int(start[-1]), cls.SEGMENT)
        if values.shape != slots or index.shape != slots or index.dtype != torch.uint8:
            raise ValueError(f"{list(values.shape)} values where the counts say {list(slots)}")
        _, first, _, offset = cls._places(index, counts, columns, taps)
        # an empty place reads its segment's first column: nothing outside of x is read
        wide = (columns - first).clamp(max=cls.SEGMENT)[:, None]
        if bool(((offset < 0) | (offset >= wide)).any()):
            raise ValueError("a column that is not of its segment")
        return [start]

    @classmethod
    def _places(cls, index: Tensor, counts: Tensor, columns: int, taps: int) -> tuple[Tensor, ...]:
        """Of each slot: its tile, the first column of its segment, its tap; and of its places, (slots,
        SEGMENT), the columns counted from that."""
        *_, tiles, segments = counts.shape
        segment = torch.arange(counts.numel(), device="cpu").repeat_interleave(
            counts.flatten().long()
        )
        block, tile = segment // segments // tiles, segment // segments % tiles
        in_tap = counts.numel() // (tiles * segments * taps)
        within = segment % segments * cls.SEGMENT
        first = block % in_tap * segments * cls.SEGMENT + within
        offset = index.short() - (within[:, None].short() if cls.FROM_BLOCK else 0)
        return tile, first, block // in_tap, offset

    @property
    def slots(self) -> int:
        """How many there are."""
        return int(self.start[-1])

    def dense(self) -> Tensor:
        """The matrix with its zeros, (rows, taps * columns), in the dtype of the values."""
        index, values = self.index[: self.slots], self.values[: self.slots]
        tile, first, tap, offset = self._places(index, self.counts, self.columns, self.taps)
        slot, place = values.nonzero(as_tuple=True)
        row = tile[slot] * TILE + place // (self.SEGMENT // TILE)
        column = (tap * self.columns + first)[slot] + offset[slot, place]
        out = values.new_zeros(self.rows, self.taps * self.columns)
        out[row, column] = values[slot, place]
        return out

    @classmethod
    def in_slots(cls, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, index and counts of a weight (rows, columns)."""
        rows, columns = weight.shape
        row, column = weight.nonzero(as_tuple=True)  # row by row
        value = weight[row, column]
        deep = cls.SEGMENT // TILE
        *_, tiles, segments = shape = cls.cut(rows, columns)
        across = segments * (shape[0] if len(shape) == 3 else 1)
        run = row * across + column // cls.SEGMENT
        filled = torch.bincount(run, minlength=tiles * TILE * across)
        rank = torch.arange(len(run), device="cpu") - (filled.cumsum(0) - filled)[run]
        # the fullest row of a tile counts
        most = -(-filled.view(tiles, TILE, across).amax(1) // deep)
        counts = most.view(tiles, -1, segments).transpose(0, 1).reshape(shape)
        flat = counts.flatten()
        block, within = column // (segments * cls.SEGMENT), column // cls.SEGMENT % segments
        first = (flat.cumsum(0) - flat)[(block * tiles + row // TILE) * segments + within]
        position = (first + rank // deep) * cls.SEGMENT + row % TILE * deep + rank % deep
        # an empty place reads the first column of its segment
        empty = (
            torch.arange(len(flat), device="cpu").remainder(segments).repeat_interleave(flat)
            * cls.SEGMENT
        )
        empty = empty if cls.FROM_BLOCK else torch.zeros_like(empty)
        index = empty.to(torch.uint8)[:, None].repeat(1, cls.SEGMENT)
        values = value.new_zeros(index.shape)
        values.view(-1)[position] = value
        index.view(-1)[position] += (column % cls.SEGMENT).to(torch.uint8)
        return values, index, counts.to(torch.uint8)


class TiledMatrix(SlotMatrix):
    """One non-zero of each row in a slot, in float32 or bfloat16. Their columns are counted from the
    first of a block of 128."""

    SEGMENT, SEGMENTS, FROM_BLOCK = TILE, BLOCK // TILE, True

    @classmethod
    def packed(cls, weight: Tensor, taps: int = 1) -> Self:
        return cls.of(cls.in_slots(weight), *weight.shape)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x S^T + bias`` with x (tokens, columns) in float32 or bfloat16 and the bias in float32;
        (tokens, rows) in the dtype of x, summed in float32."""
        library, x = products.KERNELS.load(), x.contiguous()
        tokens, rows, columns = len(x), self.rows, self.columns
        out = x.new_empty(tokens, rows)
        flags = LOW if x.dtype == torch.bfloat16 else 0
        flags += LOW_VALUES if self.values.dtype == torch.bfloat16 else 0
        bias = None if bias is None else bias.contiguous()
        values, index, counts, start = self.addresses
        fixed = [*map(address, (x, out, bias)), values, index, start]
        count = self.values.numel()
        if 0 < tokens <= FEW:
            operands = (*fixed, counts, rows, columns, tokens, BEGIN, END, flags)
            in_parts(library.nm_token, operands, -(-rows // TILE), tokens * count // FEW_WORTH)
        elif tokens:
            whole = (*fixed, rows, columns, tokens)
            in_panels(library.nm_product, whole, flags + TILED, tokens, rows, count)
        return out
