"""Products with an N:M matrix on the CPU: ``nm_pack.c``, ``nm_product.c`` and ``nm_sampled.c``.

Packed matrices hold their non-zeros alone, so that any N:M, and any mixture of patterns, is as fast
as its count of non-zeros allows. Sums are of float32; the bits of a result depend on nothing but
the operands, whatever the number of threads or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels.matrix import Matrix
from nmrun.kernels.compiler import BEGIN, END, CFunctions, address, in_parts, in_tokens_or_rows

BLOCK = 128  # columns, as in nm_product.c
PANEL = 64  # tokens, as in nm_product.c
LINE = 16  # rows whose results of a token share a piece of the cache
DTYPES = (torch.float32, torch.bfloat16)  # of the dense operands
FULL = 4  # from more than one entry in so many on the transpose is packed from the matrix itself
WORTH = 32  # multiplications that cost as much as a weight in another pass, see in_parts
LOW, TURNED = 3, 4  # flags of nm_product.c
KERNELS = CFunctions(
    "N:M products on the CPU",
    (
        *("nm_scratch", "nm_vectors", "nm_product", "nm_token", "nm_sampled"),
        *("nm_window", "nm_convolution", "nm_pack"),
    ),
    # For Zen 2 and 3 and Alder Lake GCC fuses no sums that wait for each other. Then a token's bits
    # would depend on how many there are, since other loops are fused.
    ("-ffp-contract=fast", "--param=avoid-fma-max-bits=0", "-fno-math-errno", "-Wno-psabi"),
    __package__,
    {
        "nm_product": "p" * 6 + "n" * 7 + "i",
        "nm_token": "p" * 7 + "n" * 5 + "i",
        "nm_sampled": "p" * 4 + "n" * 5 + "ip",
        "nm_convolution": "p" * 7 + "n" * 4,
        "nm_images": "",
        "nm_lanes": "n",
        "nm_turn": "pp" + "n" * 4 + "p",
        "nm_count": "p" + "n" * 5 + "p",
        "nm_fill": "p" + "n" * 5 + "ppp",
        "nm_count_turned": "pp" + "n" * 4 + "p",
        "nm_fill_turned": "ppp" + "n" * 4 + "ppp",
        "nm_turned": "p" + "n" * 5 + "p" * 4,  # with AVX-512 alone
        "nm_unpack": "ppp" + "n" * 5 + "p",
        "nm_starts": "pn",
    },
)


class PackedMatrix(Matrix):
    """A sparse matrix (rows, columns), its non-zeros row by row within blocks of 128 columns; or
    one for each position of a convolution's kernel (tap), side by side.

    Attributes:
        values: float32, the non-zeros; there may be room behind them.
        index: uint8, their columns, counted from the block's first.
        start: int32, blocks * rows + 1: where row r of block b begins, at ``[b * rows + r]``; each
            tap has its own blocks.
    """

    STORED, DERIVED = ("values", "index", "start"), ()

    @classmethod
    def empty(cls, rows: int, columns: int, taps: int = 1) -> Self:
        """Memory for any matrix of this shape, of which only what is filled is ever touched; it
        holds none yet."""
        room = taps * rows * columns
        starts = taps * blocks_of(columns) * rows + 1
        parts = (
            torch.empty(room, dtype=torch.float32, device="cpu"),
            torch.empty(room, dtype=torch.uint8, device="cpu"),
            torch.zeros(starts, dtype=torch.int32, device="cpu"),
        )
        return cls(parts, rows, columns, taps)

    @classmethod
    def packed(cls, weight: Tensor, taps: int = 1) -> Self:
        full = cls.empty(len(weight), weight.shape[1] // taps, taps)
        pack(weight, full)
        values, index = (t[: full.count].clone() for t in (full.values, full.index))
        return cls([values, index, full.start], *full.shape)

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        values, index, start = stored
        blocks = taps * blocks_of(columns)
        fits = start.shape == (blocks * rows + 1,) and start.dtype == torch.int32
        counts = start.diff() if fits else start
        if not fits or int(start[0]) or bool((counts < 0).any()):
            raise ValueError(f"start is not that of {rows} x {taps * columns}")
        count = int(start[-1])
        if values.shape != (count,) or index.shape != (count,):
            raise ValueError(f"{len(values)} values where start says {count}")
        if index.dtype != torch.uint8:
            raise ValueError(f"index of {index.dtype}, not uint8")
        last = torch.arange(blocks, device="cpu") % blocks_of(columns) * BLOCK
        wide = (columns - last).clamp(max=BLOCK).repeat_interleave(rows)
        if bool((index >= wide.repeat_interleave(counts)).any()):
            raise ValueError("a column that is not of its block")
        return []

    @property
    def count(self) -> int:
        """How many non-zeros it holds."""
        return int(self.start[-1])

    def dense(self) -> Tensor:
        """The matrix with its zeros, (rows, taps * columns), in the dtype of the values."""
        size = self.rows, self.taps * self.columns
        out = torch.empty(size, dtype=torch.float32, device="cpu")
        values = self.values.float()  # a model that is cast casts them as well
        parts = [t.data_ptr() for t in (values, self.index, self.start)]
        shape, to = (self.taps, self.rows, self.columns), out.data_ptr()
        library = KERNELS.load()
        in_parts(library.nm_unpack, (*parts, *shape, BEGIN, END, to), self.rows, out.numel())
        return out.to(self.values.dtype)

    def pack_both(self, weight: Tensor, other: Tensor | None, turned: PackedMatrix) -> int:
        """Pack a weight (rows, taps * columns) into this one, and the transpose of every tap of it, or
        of an ``other`` weight, into ``turned``. Without taps they may be stored by columns.

        Returns how many non-zeros the weight has.
        """
        if other is not None:
            by_taps = other.unflatten(1, (self.taps, -1)).permute(2, 1, 0)
            pack(by_taps.contiguous().flatten(1), turned)
            pack(weight.contiguous(), self)
        elif weight.is_contiguous():
            pack(weight, self, turned)
        else:
            pack(weight.t().contiguous(), turned, self)
        return self.count

    def multiply(self, x: Tensor, bias: Tensor | None = None, turned: bool = False) -> Tensor:
        """``x S^T + bias`` with x (tokens, columns) in float32 or bfloat16; (tokens, rows) in the dtype of
        x, summed in float32. ``turned``: x is (columns, tokens) and float32, the result is (rows, tokens)."""
        library, x = KERNELS.load(), x.contiguous()
        tokens = x.shape[1] if turned else x.shape[0]
        out = x.new_empty((self.rows, tokens) if turned else (tokens, self.rows))
        bias = None if bias is None else bias.float().contiguous()
        flags = TURNED if turned else LOW if x.dtype == torch.bfloat16 else 0
        operands = [*map(address, (x, out, bias)), *self.addresses]
        operands += [self.rows, self.columns, tokens]
        in_panels(library.nm_product, operands, flags, tokens, self.rows, self.count)
        return out

    def sampled(self, x: Tensor, y: Tensor) -> Tensor:
        """``y^T x`` where this matrix has non-zeros, whatever they are, zero elsewhere; x (tokens, columns)
        and y (tokens, rows) in float32 or bfloat16, the result in float32."""
        library, x, y = KERNELS.load(), x.contiguous(), y.contiguous()
        sums = torch.zeros(self.count, dtype=torch.float32, device="cpu")
        flags = (x.dtype == torch.bfloat16) + 2 * (y.dtype == torch.bfloat16)
        fixed = [t.data_ptr() for t in (x, y, self.index, self.start)]
        shape = (self.rows, self.columns, len(x), BEGIN, END, flags, sums.data_ptr())
        in_parts(library.nm_sampled, (*fixed, *shape), self.rows, len(x) * len(sums) // WORTH)
        return PackedMatrix([sums, self.index, self.start], self.rows, self.columns).dense()


def blocks_of(columns: int) -> int:
    """How many blocks the columns of a matrix are cut into."""
    return -(-columns // BLOCK)


def pack(matrix: Tensor, rows: PackedMatrix, turned: PackedMatrix | None = None) -> None:
    """Pack a matrix (rows, taps * columns), float32, contiguous, into memory of
    :meth:`PackedMatrix.empty`, and the transpose of every tap, (columns, rows) each, into ``turned``."""
    library, size = KERNELS.load(), matrix.numel()
    r, c, taps = rows.rows, rows.columns, rows.taps
    source, start = (matrix.data_ptr(), taps, r, c), rows.start.data_ptr()
    in_parts(library.nm_count, (*source, BEGIN, END, start), r, size)
    count = library.nm_starts(start, len(rows.start) - 1)
    to = (rows.values.data_ptr(), rows.index.data_ptr())
    in_parts(library.nm_fill, (*source, BEGIN, END, start, *to), r, size)
    if turned is None:
        return
    blocks, begins = taps * blocks_of(r), turned.start.data_ptr()
    into = (begins, turned.values.data_ptr(), turned.index.data_ptr())
    if FULL * count > size and hasattr(library, "nm_turned"):
        in_parts(library.nm_turned, (*source, BEGIN, END, start, *into), blocks, size)
        return
    counted, filled = (rows.index.data_ptr(), start, r, c), (*to, start, r, c)
    in_parts(library.nm_count_turned, (*counted, BEGIN, END, begins), blocks, size)
    library.nm_starts(begins, len(turned.start) - 1)
    in_parts(library.nm_fill_turned, (*filled, BEGIN, END, *into), blocks, size)


def in_panels(
    kernel: Any, operands: Sequence[int], flags: int, tokens: int, rows: int, count: int
) -> None:
    """Call ``nm_product``, whose operands before the parts and whose ``flags`` are given. The matrix has
    ``count`` non-zeros."""
    work = tokens * count // WORTH
    in_tokens_or_rows(kernel, operands, tokens, rows, work, PANEL, LINE, [flags])
