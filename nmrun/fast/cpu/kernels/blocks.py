"""Products of bfloat16 and int8 with a V:N:M matrix on the CPU: ``nm_block_bf16.c``, whose layout this
is, and ``nm_block_int8.c``.

V rows share their columns, so a group of them is a small dense matrix, whose inputs are gathered.
It is multiplied by AMX where the processor has it and the system allows it, else by ``vdpbf16ps``.
In bfloat16 sums and the bias are float32. The bits of a result depend on nothing but the operands
and which of the two it is, whatever the number of threads or tokens. In int8 they are those of
:mod:`nmrun.fast.cpu.kernels.int8`, by either.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import int8
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

TILE = 16  # rows, as in nm_block_bf16.c
DEEP, BYTES = 32, 64  # columns of a tile, in bfloat16 and in int8
PANEL = 32  # tokens that are turned together
HEIGHTS = (64, 32, 16)  # rows of a group that are looked for; a larger V has such groups too
WORTH = 64  # multiplications that cost as much as a weight in another pass, see in_parts
TILES_REFUSED, TILES = 1, 2  # of nm_tiles
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


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix (rows, columns) whose groups of V rows have their non-zeros in the same columns.

    Attributes:
        values: (groups, V / 16, depth, 16, 32), bfloat16: the kept columns of each group, with zeros
            behind them and behind the last row. There may be room behind whole tiles.
        index: (groups, 32 * depth), int32: which these are, increasing; ``columns`` fills up.
        counts: (groups,), int32: how many there are.
        rows, columns: the shape.
    """

    # what :meth:`of` takes, and what follows from these
    STORED: ClassVar[tuple[str, ...]] = ("values", "index")
    DERIVED: ClassVar[tuple[str, ...]] = ("counts",)

    values: Tensor
    index: Tensor
    counts: Tensor
    rows: int
    columns: int

    @classmethod
    def empty(cls, rows: int, columns: int, height: int) -> BlockMatrix:
        """Memory for any matrix of this shape in groups of ``height`` rows, of which only what is filled is
        ever touched; it holds none yet."""
        groups, deep = -(-rows // height), -(-columns // DEEP)
        return cls(
            torch.empty(groups, height // TILE, deep, TILE, DEEP, dtype=torch.bfloat16),
            torch.empty(groups, deep * DEEP, dtype=torch.int32),
            torch.zeros(groups, dtype=torch.int32),
            rows,
            columns,
        )

    @classmethod
    def of(cls, values: Tensor, index: Tensor, rows: int, columns: int) -> BlockMatrix:
        """Raises ValueError for tensors that hold no matrix of this shape, so that nothing outside of
        x is read."""
        counts = _counts(values, index, rows, columns, torch.bfloat16, DEEP)
        return cls(values.contiguous(), index.contiguous(), counts, rows, columns)

    @property
    def height(self) -> int:
        """The rows of a group: V."""
        return self.values.shape[1] * TILE

    def dense(self) -> Tensor:
        """The matrix with its zeros, bfloat16."""
        small = self.values.transpose(2, 3).reshape(len(self.index), self.height, -1)
        return _spread(small, self)


@dataclass(frozen=True)
class BlockTranspose:
    """The transpose (columns, rows) of a matrix of such groups; V divides its rows.

    Attributes:
        values: (groups * depth, V / 32 rounded up, 16, 32), bfloat16: tiles of 16 kept columns and 32
            rows of a group; ``depth`` is that of 16 columns.
        index, counts: those of a :class:`BlockMatrix`.
        rows, columns: the shape of the transpose.
    """

    STORED: ClassVar[tuple[str, ...]] = ("values", "index", "counts")
    DERIVED: ClassVar[tuple[str, ...]] = ()

    values: Tensor
    index: Tensor
    counts: Tensor
    rows: int
    columns: int

    @classmethod
    def empty(cls, rows: int, columns: int, height: int) -> BlockTranspose:
        """Memory as that of :meth:`BlockMatrix.empty`."""
        groups, deep, tall = columns // height, -(-rows // DEEP), -(-height // DEEP)
        return cls(
            torch.empty(groups * 2 * deep, tall, TILE, DEEP, dtype=torch.bfloat16),
            torch.empty(groups, deep * DEEP, dtype=torch.int32),
            torch.zeros(groups, dtype=torch.int32),
            rows,
            columns,
        )

    @property
    def height(self) -> int:
        """The rows of a group: V."""
        return self.columns // len(self.index)


@dataclass(frozen=True)
class Int8BlockMatrix:
    """The matrix of a :class:`BlockMatrix` in int8.

    Attributes:
        values: (groups, V / 16, depth, 16, 64), int8.
        index: (groups, 64 * depth), int32.
        scales: (rows,), float32.
        counts: (groups,), int32.
        sums: (groups * V,), int32: of the values of a row.
        rows, columns: the shape.
    """

    STORED: ClassVar[tuple[str, ...]] = ("values", "index", "scales")
    DERIVED: ClassVar[tuple[str, ...]] = ("counts", "sums")

    values: Tensor
    index: Tensor
    scales: Tensor
    counts: Tensor
    sums: Tensor
    rows: int
    columns: int

    @classmethod
    def of(
        cls, values: Tensor, index: Tensor, scales: Tensor, rows: int, columns: int
    ) -> Int8BlockMatrix:
        """Raises ValueError for tensors that hold no matrix of this shape."""
        counts = _counts(values, index, rows, columns, torch.int8, BYTES)
        if scales.shape != (rows,) or scales.dtype != torch.float32:
            raise ValueError(f"{list(scales.shape)} {scales.dtype} scales")
        if index.shape[1] > int8.ROW:
            raise ValueError(f"rows of {index.shape[1]} non-zeros: 32 bits add up {int8.ROW}")
        sums = values.sum((2, 4), dtype=torch.int32).flatten()
        values, index, scales = (t.contiguous() for t in (values, index, scales))
        return cls(values, index, scales, counts, sums, rows, columns)

    def dense(self) -> Tensor:
        """The matrix with its zeros, float32."""
        small = self.values.transpose(2, 3).reshape(len(self.index), -1, self.index.shape[1])
        return _spread(small.float(), self) * self.scales[:, None]


def _counts(
    values: Tensor, index: Tensor, rows: int, columns: int, dtype: torch.dtype, wide: int
) -> Tensor:
    """How many columns each group keeps. Raises ValueError for tensors that hold no matrix."""
    about = f"{list(values.shape)} {values.dtype} values with {list(index.shape)} index"
    if values.dim() != 5 or values.shape[3:] != (TILE, wide) or values.dtype != dtype:
        raise ValueError(f"{about}: they are no tiles")
    groups, tiles, deep = values.shape[:3]
    if index.shape != (groups, deep * wide) or index.dtype != torch.int32 or not tiles:
        raise ValueError(about)
    if groups != -(-rows // (tiles * TILE)):
        raise ValueError(f"{about}: they are not those of {rows} x {columns}")
    if bool(((index < 0) | (index > columns)).any()):
        raise ValueError("a column that is not of the matrix")
    return (index < columns).sum(1, dtype=torch.int32)


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


def packed(matrix: Tensor, height: int) -> BlockMatrix:
    """A matrix (rows, columns) with zeros in groups of ``height`` rows, a multiple of 16; rounded to
    bfloat16."""
    return BlockMatrix.of(*_in_tiles(matrix.bfloat16(), height, DEEP), *matrix.shape)


def packed_int8(matrix: Tensor, height: int) -> Int8BlockMatrix:
    """The same, rounded to int8, a scale a row. Raises ValueError for values that are not finite."""
    low, scales = int8.rounded(matrix)
    return Int8BlockMatrix.of(*_in_tiles(low, height, BYTES), scales, *matrix.shape)


def _in_tiles(matrix: Tensor, height: int, wide: int) -> tuple[Tensor, Tensor]:
    """The values of a matrix in tiles of 16 rows and ``wide`` columns, and the index of columns."""
    rows, columns = matrix.shape
    keep = kept_columns(matrix != 0, height)
    groups, most = len(keep), max(1, int(keep.sum(1).max()))
    deep = -(-most // wide)
    # the kept columns, in order, and behind them the one of zeros
    places = torch.where(keep, torch.arange(columns), columns).sort(1).values
    index = torch.full((groups, deep * wide), columns)
    index[:, : min(deep * wide, columns)] = places[:, : deep * wide]
    whole = matrix.new_zeros(groups * height, columns + 1)
    whole[:rows, :columns] = matrix
    small = whole.view(groups, height, -1).gather(2, index[:, None].expand(-1, height, -1))
    values = small.view(groups, height // TILE, TILE, deep, wide).transpose(2, 3).contiguous()
    return values, index.int()


def pack(weight: Tensor, into: BlockMatrix | BlockTranspose) -> None:
    """Round a float32 weight (outputs, inputs) and pack it, or its transpose, into memory of ``empty``."""
    turned = isinstance(into, BlockTranspose)
    rows, columns = weight.shape
    weight, groups, padded = weight.contiguous(), *into.index.shape
    shape = (rows, columns, into.height, padded, int(turned), BEGIN, END)
    to = (into.values.data_ptr(), into.index.data_ptr(), into.counts.data_ptr())
    in_parts(KERNELS.load().nm_block_pack, (weight.data_ptr(), *shape, *to), groups, weight.numel())


def pack_both(
    weight: Tensor, other: Tensor | None, forward: BlockMatrix, backward: BlockTranspose
) -> int:
    """Pack a weight (outputs, inputs) into ``forward``, and the transpose of it, or of an ``other``
    weight, into ``backward``. Returns how many entries the kept columns of the weight have."""
    pack(weight, forward)
    pack(weight if other is None else other, backward)
    return int(forward.counts.sum()) * forward.height


def sampled(x: Tensor, y: Tensor, mask: BlockMatrix, by_tiles: bool | None = None) -> Tensor:
    """``y^T x`` in the columns that the groups of ``mask`` (rows, columns) keep, zero elsewhere, in
    float32; x (tokens, columns) and y (tokens, rows) in bfloat16. V divides the rows."""
    library, x, y = KERNELS.load(), x.contiguous(), y.contiguous()
    groups, padded = mask.index.shape
    by_tiles = not tiles_obstacle() if by_tiles is None else by_tiles
    out = torch.zeros(mask.rows, mask.columns)
    operands = [address(t) for t in (x, y, mask.index, mask.counts, out)]
    operands += [mask.rows, mask.columns, mask.height, padded, int(by_tiles), len(x)]
    work = len(x) * int(mask.counts.sum()) * mask.height // WORTH
    in_parts(library.nm_block_bf16_sampled, (*operands, BEGIN, END), groups, work)
    return out


def multiply(
    x: Tensor,
    matrix: BlockMatrix | BlockTranspose,
    bias: Tensor | None = None,
    by_tiles: bool | None = None,
) -> Tensor:
    """``x S^T + bias``, with x (tokens, columns) in bfloat16; (tokens, rows) in bfloat16, rounded once. A
    transpose takes no bias. ``by_tiles``: by AMX; None: where it can. Raises RuntimeError where there are
    no such products."""
    library, x = KERNELS.load(), x.contiguous()
    tokens, rows, columns = len(x), matrix.rows, matrix.columns
    out = x.new_empty(tokens, rows)
    groups, padded = matrix.index.shape
    by_tiles = not tiles_obstacle() if by_tiles is None else by_tiles
    parts = [matrix.values, matrix.index, matrix.counts]
    work = tokens * groups * matrix.height * int(matrix.counts.max()) // WORTH if groups else 0
    how = (matrix.height, padded, int(by_tiles))
    if isinstance(matrix, BlockTranspose):
        operands = (*map(address, (x, out, *parts)), columns, rows, *how, BEGIN, END)
        in_parts(library.nm_block_bf16_turned, operands, tokens, work, PANEL)
        return out
    bias = None if bias is None else bias.float().contiguous()
    operands = (*map(address, (x, out, bias, *parts)), rows, columns, *how)
    in_tokens_or_rows(library.nm_block_bf16, operands, tokens, groups, work, PANEL)
    return out


def multiply_int8(
    x: Tensor, matrix: Int8BlockMatrix, bias: Tensor | None = None, by_tiles: bool | None = None
) -> Tensor:
    """The same in int8, all float32: as :func:`nmrun.fast.cpu.kernels.int8.multiply`."""
    library, x = int8.KERNELS.load(), x.contiguous()
    (tokens, columns), rows = x.shape, matrix.rows
    out = x.new_empty(tokens, rows)
    bias = None if bias is None else bias.contiguous()
    groups, padded = matrix.index.shape
    height = matrix.values.shape[1] * TILE
    by_tiles = not tiles_obstacle() if by_tiles is None else by_tiles
    odd, size = ctypes.c_int32(0), (ctypes.c_int64 * 4)(rows, columns, height, padded)
    parts = (matrix.values, matrix.index, matrix.counts, matrix.scales, matrix.sums)
    operands = [address(t) for t in (x, out, bias, *parts)]
    operands += [ctypes.addressof(odd), ctypes.addressof(size), int(by_tiles)]
    work = tokens * matrix.values.numel() // int8.WORTH
    in_tokens_or_rows(library.nm_block_int8, operands, tokens, groups, work, PANEL)
    if odd.value:
        raise RuntimeError("int8 products: the activations have NaN or infinity")
    return out


def _spread(small: Tensor, matrix: BlockMatrix | Int8BlockMatrix) -> Tensor:
    """The matrix of groups (groups, V, kept columns)."""
    out = small.new_zeros(*small.shape[:2], matrix.columns + 1)
    filled = torch.arange(small.shape[2]) < matrix.counts[:, None]
    index = torch.where(filled, matrix.index.long(), matrix.columns)
    small = torch.where(filled[:, None], small, 0)
    out.scatter_(2, index[:, None].expand_as(small), small)
    return out.flatten(0, 1)[: matrix.rows, : matrix.columns].contiguous()


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
    weight = torch.randn(48, 96, generator=generator)
    weight[:, ::3] = 0
    matrix, x = packed(weight, 48), torch.randn(40, 96, generator=generator).bfloat16()
    one, other = (multiply(x, matrix, by_tiles=way).float() for way in (True, False))
    right = torch.allclose(one, other, rtol=2**-7, atol=2**-7 * float(other.abs().max()))
    return "" if right else "AMX gives wrong numbers"
