"""Products of bfloat16 and int8 with a V:N:M matrix on the CPU: ``nm_block_bf16.c``, whose layout this
is, and ``nm_block_int8.c``. By AMX also products of any N:M matrix for few tokens: ``nm_bitmap_bf16.c``.

V rows share their columns, so a group of them is a small dense matrix, whose inputs are gathered.
It is multiplied by AMX where the processor has it and the system allows it, else by ``vdpbf16ps``.
In bfloat16 sums and the bias are float32. The bits of a result depend on nothing but the operands
and which of the two it is, whatever the number of threads or tokens. In int8 they are those of
:mod:`nmrun.fast.cpu.kernels.int8`, by either.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.kernels.matrix import Matrix
from nmrun.fast.cpu.kernels.tiles import TILE
from nmrun.kernels.compiler import (
    BEGIN,
    END,
    SAME_BITS,
    CFunctions,
    address,
    in_parts,
    in_tokens_or_rows,
)
from nmrun.patterns import Pattern

DEEP = 32  # columns of a tile in bfloat16; in int8 there are twice as many
PANEL = 32  # tokens that are turned together
HEIGHTS = (64, 32, 16)  # rows of a group that are looked for; a larger V has such groups too
WORTH = 64  # multiplications that cost as much as a weight in another pass, see in_parts
TILES_REFUSED, TILES = 1, 2  # of nm_tiles
BITS = 1 << torch.arange(DEEP, device="cpu")
KERNELS = CFunctions(
    "products of bfloat16 with blocks",
    ("nm_scratch", "nm_vectors", "nm_tiles", "nm_block_bf16", "nm_bitmap_bf16"),
    (*SAME_BITS, "-Wno-psabi"),
    __package__,
    {
        "nm_block_bf16": "p" * 6 + "n" * 9,
        "nm_block_bf16_turned": "p" * 5 + "n" * 7,
        "nm_block_bf16_sampled": "p" * 5 + "n" * 8,
        "nm_block_pack": "p" + "n" * 7 + "ppp",
        "nm_bitmap_bf16": "p" * 6 + "n" * 6,
        "nm_tiles": "",
    },
    needs="AVX-512 with BF16",
)


class BlockMatrix(Matrix):
    """A matrix whose groups of V rows have their non-zeros in the same columns.

    Attributes:
        values: (groups, V / 16, depth, 16, WIDE): the kept columns of each group, with zeros behind them
            and behind the last row. There may be room behind whole tiles.
        index: (groups, WIDE * depth), int32: which these are, increasing; ``columns`` fills up.
        counts: (groups,), int32: how many there are.
    """

    DTYPE: ClassVar[torch.dtype] = torch.bfloat16
    WIDE: ClassVar[int] = DEEP  # columns of a tile
    STORED: ClassVar[tuple[str, ...]] = ("values", "index")
    DERIVED: ClassVar[tuple[str, ...]] = ("counts",)
    KEPT, COMPUTES = ("values",), torch.bfloat16

    @classmethod
    def empty(cls, rows: int, columns: int, height: int) -> Self:
        """Memory for any matrix of this shape in groups of ``height`` rows, of which only what is filled is
        ever touched; it holds none yet."""
        groups, deep = -(-rows // height), -(-columns // DEEP)
        values = torch.empty(
            groups, height // TILE, deep, TILE, DEEP, dtype=torch.bfloat16, device="cpu"
        )
        return cls([values, *_empty_index(groups, deep)], rows, columns)

    @classmethod
    def packed(cls, weight: Tensor, taps: int = 1, height: int | None = None) -> Self:
        """Rounded, in groups of ``height`` rows, a multiple of 16; None: as :func:`height_of` finds. Raises
        ValueError where 16 rows side by side do not share their columns."""
        height = height or height_of(weight != 0)
        if height is None:
            raise ValueError("16 rows side by side keep more than three quarters of the columns")
        low, scales = cls.rounded(weight)
        return cls.of([*_in_tiles(low, height, cls.WIDE), *scales], *weight.shape)

    @classmethod
    def rounded(cls, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A weight as it is stored, and what else is stored."""
        return weight.bfloat16(), []

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        values, index = stored[:2]
        about = f"{list(values.shape)} {values.dtype} values with {list(index.shape)} index"
        if values.dim() != 5 or values.shape[3:] != (TILE, cls.WIDE) or values.dtype != cls.DTYPE:
            raise ValueError(f"{about}: they are no tiles")
        groups, tiles, deep = values.shape[:3]
        if index.shape != (groups, deep * cls.WIDE) or index.dtype != torch.int32 or not tiles:
            raise ValueError(about)
        if groups != -(-rows // (tiles * TILE)):
            raise ValueError(f"{about}: they are not those of {rows} x {columns}")
        if bool(((index < 0) | (index > columns)).any()):
            raise ValueError("a column that is not of the matrix")
        return [(index < columns).sum(1, dtype=torch.int32)]

    @property
    def height(self) -> int:
        """The rows of a group: V."""
        return self.values.shape[1] * TILE

    def dense(self) -> Tensor:
        """The matrix with its zeros, in the dtype of the values."""
        small = self.values.transpose(2, 3).reshape(len(self.index), self.height, -1)
        out = small.new_zeros(*small.shape[:2], self.columns + 1)
        filled = torch.arange(small.shape[2], device="cpu") < self.counts[:, None]
        index = torch.where(filled, self.index.long(), self.columns)
        small = torch.where(filled[:, None], small, 0)
        out.scatter_(2, index[:, None].expand_as(small), small)
        return out.flatten(0, 1)[: self.rows, : self.columns].contiguous()

    def pack_both(self, weight: Tensor, other: Tensor | None, turned: BlockTranspose) -> int:
        """Pack a float32 weight (outputs, inputs) into this one, and the transpose of it, or of an
        ``other`` weight, into ``turned``; rounded. Returns how many entries the kept columns of the weight
        have."""
        _pack(weight, self)
        _pack(weight if other is None else other, turned)
        return int(self.counts.sum()) * self.height

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, by_tiles: bool | None = None
    ) -> Tensor:
        """``x S^T + bias``, with x (tokens, columns) in bfloat16; (tokens, rows) in bfloat16, rounded once.
        ``by_tiles``: by AMX; None: where it can. Raises RuntimeError where there are no such products."""
        library, x = KERNELS.load(), x.contiguous()
        tokens, groups = len(x), len(self.index)
        out = x.new_empty(tokens, self.rows)
        bias = None if bias is None else bias.float().contiguous()
        operands: list[Any] = [*map(address, (x, out, bias)), *self.addresses]
        operands += [self.rows, self.columns, *_how(self, by_tiles)]
        work = _work(self, tokens)
        in_tokens_or_rows(library.nm_block_bf16, operands, tokens, groups, work, PANEL)
        return out

    def sampled(self, x: Tensor, y: Tensor, by_tiles: bool | None = None) -> Tensor:
        """``y^T x`` in the columns that the groups of this matrix keep, zero elsewhere, in float32; x
        (tokens, columns) and y (tokens, rows) in bfloat16. V divides the rows."""
        library, x, y = KERNELS.load(), x.contiguous(), y.contiguous()
        out = torch.zeros(self.rows, self.columns, dtype=torch.float32, device="cpu")
        operands: list[Any] = [address(t) for t in (x, y, self.index, self.counts, out)]
        operands += [self.rows, self.columns, *_how(self, by_tiles), len(x), BEGIN, END]
        work = len(x) * int(self.counts.sum()) * self.height // WORTH
        in_parts(library.nm_block_bf16_sampled, operands, len(self.index), work)
        return out


class BlockTranspose(Matrix):
    """The transpose (columns, rows) of a matrix of such groups; V divides its rows.

    Attributes:
        values: (groups * depth, V / 32 rounded up, 16, 32), bfloat16: tiles of 16 kept columns and 32
            rows of a group; ``depth`` is that of 16 columns.
        index, counts: those of a :class:`BlockMatrix`.
        rows, columns: the shape of the transpose.
    """

    STORED, DERIVED = ("values", "index", "counts"), ()

    @classmethod
    def empty(cls, rows: int, columns: int, height: int) -> Self:
        """Memory as that of :meth:`BlockMatrix.empty`."""
        groups, deep, tall = columns // height, -(-rows // DEEP), -(-height // DEEP)
        values = torch.empty(
            groups * 2 * deep, tall, TILE, DEEP, dtype=torch.bfloat16, device="cpu"
        )
        return cls([values, *_empty_index(groups, deep)], rows, columns)

    @property
    def height(self) -> int:
        """The rows of a group: V."""
        return self.columns // len(self.index)

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, by_tiles: bool | None = None
    ) -> Tensor:
        """As that of :class:`BlockMatrix`, without a bias."""
        library, x = KERNELS.load(), x.contiguous()
        tokens = len(x)
        out = x.new_empty(tokens, self.rows)
        operands: list[Any] = [*map(address, (x, out)), *self.addresses]
        operands += [self.columns, self.rows, *_how(self, by_tiles), BEGIN, END]
        in_parts(library.nm_block_bf16_turned, operands, tokens, _work(self, tokens), PANEL)
        return out


class Int8BlockMatrix(BlockMatrix):
    """The same in int8.

    Attributes:
        scales: (rows,), float32.
        sums: (groups * V,), int32: of the values of a row.
    """

    DTYPE, WIDE = torch.int8, 64
    STORED, DERIVED = ("values", "index", "scales"), ("counts", "sums")
    KEPT, COMPUTES = ("scales",), torch.float32
    scales: Tensor
    sums: Tensor

    @classmethod
    def rounded(cls, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Raises ValueError for values that are not finite."""
        low, scales = int8.rounded(weight)
        return low, [scales]

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        (counts,), (values, index, scales) = super().derived(stored, rows, columns, taps), stored
        int8.check_scales(values, scales, rows)
        int8.check_row(index.shape[1])
        return [counts, values.sum((2, 4), dtype=torch.int32).flatten()]

    def dense(self) -> Tensor:
        """The matrix with its zeros, float32."""
        return super().dense().float() * self.scales[:, None]

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, by_tiles: bool | None = None
    ) -> Tensor:
        """As :meth:`nmrun.fast.cpu.kernels.int8.Int8Matrix.multiply`."""
        library, x, tokens = int8.KERNELS.load(), x.contiguous(), len(x)
        out = x.new_empty(tokens, self.rows)
        bias = None if bias is None else bias.contiguous()
        height, padded, tiles = _how(self, by_tiles)
        odd, size = ctypes.c_int32(0), (ctypes.c_int64 * 4)(self.rows, self.columns, height, padded)
        parts = (self.values, self.index, self.counts, self.scales, self.sums)
        operands: list[Any] = [address(t) for t in (x, out, bias, *parts)]
        operands += [ctypes.addressof(odd), ctypes.addressof(size), tiles]
        groups, work = len(self.index), tokens * self.values.numel() // int8.WORTH
        in_tokens_or_rows(library.nm_block_int8, operands, tokens, groups, work, PANEL)
        int8.check_finite(odd)
        return out


class BitmapMatrix(Matrix):
    """Any N:M matrix as masks and what their bits stand for: for few tokens, by AMX, in bfloat16.

    Attributes:
        values: (non-zeros,), bfloat16, in the order of the bits.
        masks: (tiles, depth, 16), int32: a bit for each of 32 columns, the lowest for the first, of a
            row of a tile of 16 rows.
        start: (tiles + 1,), int64: where the values of each tile of rows begin.
    """

    STORED, DERIVED = ("values", "masks"), ("start",)
    KEPT, COMPUTES = ("values",), torch.bfloat16
    masks: Tensor

    @classmethod
    def packed(cls, weight: Tensor, taps: int = 1) -> Self:
        """Rounded."""
        rows, columns = weight.shape
        whole = functional.pad(weight.bfloat16(), (0, -columns % DEEP, 0, -rows % TILE))
        tiles = whole.view(len(whole) // TILE, TILE, -1, DEEP).transpose(1, 2)
        kept = tiles != 0
        masks = (kept * BITS).sum(-1).int()  # the highest bit is the sign
        return cls.of([tiles[kept], masks], rows, columns)

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        values, masks = stored
        shape = (-(-rows // TILE), -(-columns // DEEP), TILE)
        if masks.shape != shape or masks.dtype != torch.int32:
            raise ValueError(f"{list(masks.shape)} masks are not those of {rows} x {columns}")
        start = functional.pad(_bits(masks).sum((1, 2, 3)).cumsum(0), (1, 0))
        if values.shape != (int(start[-1]),) or values.dtype != torch.bfloat16:
            about = f"{list(values.shape)} {values.dtype} values"
            raise ValueError(f"{about} where the masks have {int(start[-1])} bits")
        return [start]

    def dense(self) -> Tensor:
        """The matrix with its zeros, bfloat16."""
        kept = _bits(self.masks)
        tiles = torch.zeros(kept.shape, dtype=torch.bfloat16, device="cpu")
        tiles[kept] = self.values
        whole = tiles.transpose(1, 2).reshape(len(kept) * TILE, -1)
        return whole[: self.rows, : self.columns].contiguous()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As that of :class:`BlockMatrix`, by AMX alone."""
        if why := bitmaps_obstacle():
            raise RuntimeError(f"products of bitmaps: {why}")
        library, x = KERNELS.load(), x.contiguous()
        tokens, tiles = len(x), len(self.masks)
        out = x.new_empty(tokens, self.rows)
        bias = None if bias is None else bias.float().contiguous()
        operands: list[Any] = [*map(address, (x, out, bias)), *self.addresses]
        operands += [self.rows, self.columns]
        work = -(-tokens // PANEL) * len(self.values)
        in_tokens_or_rows(library.nm_bitmap_bf16, operands, tokens, tiles, work, PANEL, 2)
        return out


def _bits(masks: Tensor) -> Tensor:
    """Which of its 32 columns each mask has, bool."""
    return (masks[..., None] & BITS) != 0


def _empty_index(groups: int, deep: int) -> tuple[Tensor, Tensor]:
    index = torch.empty(groups, deep * DEEP, dtype=torch.int32, device="cpu")
    return index, torch.zeros(groups, dtype=torch.int32, device="cpu")


def _how(matrix: BlockMatrix | BlockTranspose, by_tiles: bool | None) -> tuple[int, int, int]:
    """The rows of a group, the room for its columns, and whether AMX multiplies, for a kernel."""
    by_tiles = not tiles_obstacle() if by_tiles is None else by_tiles
    return matrix.height, matrix.index.shape[1], int(by_tiles)


def _work(matrix: BlockMatrix | BlockTranspose, tokens: int) -> int:
    groups = matrix.counts.numel()
    return tokens * groups * matrix.height * int(matrix.counts.max()) // WORTH if groups else 0


def kept_columns(filled: Tensor, height: int) -> Tensor:
    """Which columns each group of so many rows keeps, (groups, columns), bool; of a matrix's mask."""
    missing = -len(filled) % height
    rows = torch.cat([filled, filled.new_zeros(missing, filled.shape[1])])
    return rows.unflatten(0, (-1, height)).any(1)


def height_of(filled: Tensor) -> int | None:
    """The rows of the groups that a weight with this mask is best cut into: the most whose groups
    keep no more columns than those of 16 rows. None where these keep more than three quarters."""
    least = None
    for height in reversed(HEIGHTS):
        if height > TILE and height > len(filled):
            break
        most = int(kept_columns(filled, height).sum(1).max())
        if least is None and 4 * most > 3 * filled.shape[1]:
            return None
        if least is not None and most > least[1]:
            break
        least = height, most
    return None if least is None else least[0]


def height_in(pattern: Pattern) -> int | None:
    """The rows of the groups that a V:N:M pattern has; None where 16 does not divide V."""
    return next((height for height in HEIGHTS if pattern.v % height == 0), None)


def _in_tiles(matrix: Tensor, height: int, wide: int) -> tuple[Tensor, Tensor]:
    """The values of a matrix in tiles of 16 rows and ``wide`` columns, and the index of columns."""
    rows, columns = matrix.shape
    keep = kept_columns(matrix != 0, height)
    groups, most = len(keep), max(1, int(keep.sum(1).max()))
    deep = -(-most // wide)
    # the kept columns, in order, and behind them the one of zeros
    places = torch.where(keep, torch.arange(columns, device="cpu"), columns).sort(1).values
    index = torch.full((groups, deep * wide), columns, device="cpu")
    index[:, : min(deep * wide, columns)] = places[:, : deep * wide]
    whole = matrix.new_zeros(groups * height, columns + 1)
    whole[:rows, :columns] = matrix
    small = whole.view(groups, height, -1).gather(2, index[:, None].expand(-1, height, -1))
    values = small.view(groups, height // TILE, TILE, deep, wide).transpose(2, 3).contiguous()
    return values, index.int()


def _pack(weight: Tensor, into: BlockMatrix | BlockTranspose) -> None:
    """Round a float32 weight (outputs, inputs) and pack it, or its transpose, into memory of ``empty``."""
    turned = isinstance(into, BlockTranspose)
    rows, columns = weight.shape
    weight, groups, padded = weight.contiguous(), *into.index.shape
    shape = (rows, columns, into.height, padded, int(turned), BEGIN, END)
    operands = (weight.data_ptr(), *shape, *into.addresses)
    in_parts(KERNELS.load().nm_block_pack, operands, groups, weight.numel())


@cache
def tiles_obstacle() -> str:
    """Why AMX does not multiply here; empty if it does. It is compared with the other products once
    a process."""
    if why := KERNELS.obstacle():
        return why
    allowed = KERNELS.load().nm_tiles()
    if allowed != TILES:
        refused = allowed == TILES_REFUSED
        return "the system refuses AMX" if refused else "this processor has no AMX"
    generator = torch.Generator().manual_seed(0)
    how: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    weight = torch.randn(48, 96, **how)
    weight[:, ::3] = 0
    matrix = BlockMatrix.packed(weight, height=48)
    x = torch.randn(40, 96, **how).bfloat16()
    one, other = (matrix.multiply(x, by_tiles=way).float() for way in (True, False))
    right = torch.allclose(one, other, rtol=2**-7, atol=2**-7 * float(other.abs().max()))
    return "" if right else "AMX gives wrong numbers"


def bitmaps_obstacle() -> str:
    """Why there are no products of bitmaps here; empty if there are."""
    if why := tiles_obstacle():
        return why
    there = hasattr(KERNELS.load(), "nm_bitmap_bf16")
    return "" if there else "this processor has no AVX-512 with VBMI2"
