"""Products of bfloat16 with a V:N:M matrix on the CPU: ``nm_block_bf16.c``, whose layout this is.

V rows share their columns, so a group of them is a small dense matrix, whose inputs are gathered.
It is multiplied by AMX where the processor has it and the system allows it, else by ``vdpbf16ps``.
Numbers are bfloat16, sums float32, and the bias is float32. The bits of a result depend on nothing
but the operands and which of the two it is, whatever the number of threads or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.kernels.compiler import CFunctions, address, in_tokens_or_rows

TILE = 16  # rows, as in nm_block_bf16.c
DEEP = 32  # columns of a tile
PANEL = 32  # tokens that are turned together
HEIGHTS = (64, 32, 16)  # rows of a group that are looked for; a larger V has such groups too
WORTH = 64  # multiplications that cost as much as a weight in another pass, see in_parts
TILES_REFUSED, TILES = 1, 2  # of nm_tiles
KERNELS = CFunctions(
    "products of bfloat16 with blocks",
    ("nm_scratch", "nm_vectors", "nm_tiles", "nm_block_bf16"),
    ("-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"),
    __package__,
    {"nm_block_bf16": "p" * 5 + "n" * 10, "nm_tiles": ""},
    needs="AVX-512 with BF16",
)


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix (rows, columns) whose groups of V rows have their non-zeros in the same columns.

    Attributes:
        values: (groups, V / 16, depth, 16, 32), bfloat16: the kept columns of each group, with zeros
            behind them and behind the last row.
        index: (groups, 32 * depth), int32: which these are, increasing; ``columns`` fills up.
        rows, columns: the shape.
    """

    # what :meth:`of` takes, and what follows from these
    STORED: ClassVar[tuple[str, ...]] = ("values", "index")
    DERIVED: ClassVar[tuple[str, ...]] = ()

    values: Tensor
    index: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, values: Tensor, index: Tensor, rows: int, columns: int) -> BlockMatrix:
        """Raises ValueError for tensors that hold no matrix of this shape, so that nothing outside of
        x is read."""
        about = f"{list(values.shape)} {values.dtype} values with {list(index.shape)} index"
        if values.dim() != 5 or values.shape[3:] != (TILE, DEEP) or values.dtype != torch.bfloat16:
            raise ValueError(f"{about}: they are no tiles")
        groups, tiles, deep = values.shape[:3]
        if index.shape != (groups, deep * DEEP) or index.dtype != torch.int32 or not tiles:
            raise ValueError(about)
        if groups != -(-rows // (tiles * TILE)):
            raise ValueError(f"{about}: they are not those of {rows} x {columns}")
        if bool(((index < 0) | (index > columns)).any()):
            raise ValueError("a column that is not of the matrix")
        return cls(values.contiguous(), index.contiguous(), rows, columns)

    @property
    def height(self) -> int:
        """The rows of a group: V."""
        return self.values.shape[1] * TILE

    @property
    def kept(self) -> int:
        """The most columns that a group keeps."""
        return int((self.index < self.columns).sum(1).max()) if self.index.numel() else 0

    def dense(self) -> Tensor:
        """The matrix with its zeros, bfloat16."""
        groups = len(self.index)
        small = self.values.transpose(2, 3).reshape(groups, self.height, -1)
        out = small.new_zeros(groups, self.height, self.columns + 1)
        out.scatter_(2, self.index[:, None].long().expand_as(small), small)
        return out.flatten(0, 1)[: self.rows, : self.columns].contiguous()


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


def packed(matrix: Tensor, height: int) -> BlockMatrix:
    """A matrix (rows, columns) with zeros in groups of ``height`` rows, a multiple of 16; rounded to
    bfloat16."""
    rows, columns = matrix.shape
    keep = kept_columns(matrix != 0, height)
    groups, most = len(keep), max(1, int(keep.sum(1).max()))
    deep = -(-most // DEEP)
    # the kept columns, in order, and behind them the one of zeros
    places = torch.where(keep, torch.arange(columns), columns).sort(1).values
    index = torch.full((groups, deep * DEEP), columns)
    index[:, : min(deep * DEEP, columns)] = places[:, : deep * DEEP]
    low = matrix.new_zeros(groups * height, columns + 1, dtype=torch.bfloat16)
    low[:rows, :columns] = matrix
    small = low.view(groups, height, -1).gather(2, index[:, None].expand(-1, height, -1))
    values = small.view(groups, height // TILE, TILE, deep, DEEP).transpose(2, 3).contiguous()
    return BlockMatrix(values, index.int(), rows, columns)


def multiply(
    x: Tensor, matrix: BlockMatrix, bias: Tensor | None = None, by_tiles: bool | None = None
) -> Tensor:
    """``x S^T + bias``, with x (tokens, columns) in bfloat16; (tokens, rows) in bfloat16, rounded once.
    ``by_tiles``: by AMX; None: where it can. Raises RuntimeError where there are no such products."""
    library, x = KERNELS.load(), x.contiguous()
    tokens, rows, columns = len(x), matrix.rows, matrix.columns
    out = x.new_empty(tokens, rows)
    bias = None if bias is None else bias.float().contiguous()
    groups, padded = matrix.index.shape
    by_tiles = not tiles_obstacle() if by_tiles is None else by_tiles
    operands = [address(t) for t in (x, out, bias, matrix.values, matrix.index)]
    operands += [rows, columns, matrix.height, padded, padded, int(by_tiles)]
    work = tokens * matrix.values.numel() // WORTH
    in_tokens_or_rows(library.nm_block_bf16, operands, tokens, groups, work, PANEL)
    return out


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
