"""Products of bfloat16 with any N:M matrix by AMX, for few tokens: ``nm_bitmap_bf16.c``, whose layout
this is. Their bits depend on nothing but the operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nmrun.fast.cpu.kernels import blocks
from nmrun.fast.cpu.kernels.blocks import DEEP, PANEL, TILE
from nmrun.kernels.compiler import address, in_tokens_or_rows

BITS = 1 << torch.arange(DEEP)


@dataclass(frozen=True)
class BitmapMatrix:
    """A sparse matrix (rows, columns) as masks and what their bits stand for.

    Attributes:
        values: (non-zeros,), bfloat16, in the order of the bits.
        masks: (tiles, depth, 16), int32: a bit for each of 32 columns, the lowest for the first, of a
            row of a tile of 16 rows.
        start: (tiles + 1,), int64: where the values of each tile of rows begin.
        rows, columns: the shape.
    """

    # what :meth:`of` takes, and what follows from these
    STORED: ClassVar[tuple[str, ...]] = ("values", "masks")
    DERIVED: ClassVar[tuple[str, ...]] = ("start",)

    values: Tensor
    masks: Tensor
    start: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, values: Tensor, masks: Tensor, rows: int, columns: int) -> BitmapMatrix:
        """Raises ValueError for tensors that hold no matrix of this shape, so that nothing outside of
        the values is read."""
        shape = (-(-rows // TILE), -(-columns // DEEP), TILE)
        if masks.shape != shape or masks.dtype != torch.int32:
            raise ValueError(f"{list(masks.shape)} masks are not those of {rows} x {columns}")
        start = F.pad(_bits(masks).sum((1, 2, 3)).cumsum(0), (1, 0))
        if values.shape != (int(start[-1]),) or values.dtype != torch.bfloat16:
            about = f"{list(values.shape)} {values.dtype} values"
            raise ValueError(f"{about} where the masks have {int(start[-1])} bits")
        return cls(values.contiguous(), masks.contiguous(), start, rows, columns)

    def dense(self) -> Tensor:
        """The matrix with its zeros, bfloat16."""
        kept = _bits(self.masks)
        tiles = torch.zeros(kept.shape, dtype=torch.bfloat16)
        tiles[kept] = self.values
        whole = tiles.transpose(1, 2).reshape(len(kept) * TILE, -1)
        return whole[: self.rows, : self.columns].contiguous()


def _bits(masks: Tensor) -> Tensor:
    """Which of its 32 columns each mask has, bool."""
    return (masks[..., None] & BITS) != 0


def packed(matrix: Tensor) -> BitmapMatrix:
    """A matrix (rows, columns) with zeros, rounded to bfloat16."""
    rows, columns = matrix.shape
    whole = F.pad(matrix.bfloat16(), (0, -columns % DEEP, 0, -rows % TILE))
    tiles = whole.view(len(whole) // TILE, TILE, -1, DEEP).transpose(1, 2)
    kept = tiles != 0
    masks = (kept * BITS).sum(-1).int()  # the highest bit is the sign
    return BitmapMatrix.of(tiles[kept], masks, rows, columns)


def multiply(x: Tensor, matrix: BitmapMatrix, bias: Tensor | None = None) -> Tensor:
    """``x S^T + bias``, with x (tokens, columns) in bfloat16; (tokens, rows) in bfloat16, rounded once.
    Raises RuntimeError where there are no such products."""
    if why := obstacle():
        raise RuntimeError(f"products of bitmaps: {why}")
    library, x = blocks.KERNELS.load(), x.contiguous()
    tokens, tiles = len(x), len(matrix.masks)
    out = x.new_empty(tokens, matrix.rows)
    bias = None if bias is None else bias.float().contiguous()
    operands = [address(t) for t in (x, out, bias, matrix.values, matrix.masks, matrix.start)]
    operands += [matrix.rows, matrix.columns]
    work = -(-tokens // PANEL) * len(matrix.values)
    in_tokens_or_rows(library.nm_bitmap_bf16, operands, tokens, tiles, work, PANEL, 2)
    return out


def obstacle() -> str:
    """Why there are no such products here; empty if there are."""
    if why := blocks.tiles_obstacle():
        return why
    there = hasattr(blocks.KERNELS.load(), "nm_bitmap_bf16")
    return "" if there else "this processor has no AVX-512 with VBMI2"
