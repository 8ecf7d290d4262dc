"""Products of bfloat16 with an N:M matrix on the CPU, by the instruction ``vdpbf16ps``: ``nm_bf16.c``,
whose layout this is.

Numbers are bfloat16, sums float32, and the bias is float32. In products subnormal numbers are zero.
The bits of a result depend on nothing but the operands, whatever the number of threads or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels.tiles import TILE, SlotMatrix
from nmrun.kernels.compiler import (
    BEGIN,
    END,
    SAME_BITS,
    CFunctions,
    address,
    in_parts,
    in_tokens_or_rows,
)

SEGMENT = 32  # columns, as in nm_bf16.c
SEGMENTS = 16  # of a block
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


class Bf16Matrix(SlotMatrix):
    """Two non-zeros of each row of a tile in a slot, in bfloat16."""

    SEGMENT, SEGMENTS = SEGMENT, SEGMENTS
    KEPT, COMPUTES = ("values",), torch.bfloat16

    @classmethod
    def empty(cls, rows: int, columns: int, taps: int = 1) -> Self:
        """Memory for any matrix of this shape, of which only what is filled is ever touched; it
        holds none yet."""
        blocks, tiles, _ = shape = cls.cut(rows, columns, taps)
        slots = taps * tiles * -(-columns // SEGMENT) * TILE
        parts = (
            torch.empty(slots, SEGMENT, dtype=torch.bfloat16, device="cpu"),
            torch.empty(slots, SEGMENT, dtype=torch.uint8, device="cpu"),
            torch.zeros(shape, dtype=torch.uint8, device="cpu"),
            torch.zeros(blocks * tiles + 1, dtype=torch.int32, device="cpu"),
        )
        return cls(parts, rows, columns, taps)

    @classmethod
    def packed(cls, weight: Tensor, taps: int = 1) -> Self:
        """Rounded."""
        full = cls.empty(len(weight), weight.shape[1] // taps, taps)
        full.pack(weight.float().contiguous())
        values, index = (t[: full.slots].clone() for t in (full.values, full.index))
        return cls([values, index, full.counts, full.start], *full.shape)

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        if stored[0].dtype != torch.bfloat16:
            raise ValueError(f"values of {stored[0].dtype}, not bfloat16")
        return super().derived(stored, rows, columns, taps)

    def pack(self, matrix: Tensor, turned: bool = False) -> int:
        """Round a float32 matrix and pack it into memory of :meth:`empty`: a matrix (rows, taps * columns),
        or ``turned`` one of (columns, taps * rows), of which the transpose of each tap is packed. Without
        taps it may be stored by columns.

        Returns how many non-zeros there are, rounded.
        """
        if not matrix.is_contiguous():
            matrix, turned = matrix.t().contiguous(), not turned
        library, size = KERNELS.load(), matrix.numel() // self.taps
        across, tiles = (self.rows if turned else self.columns), self.counts.shape[1]
        shape = (int(turned), matrix.shape[1], self.rows, self.columns, BEGIN, END)
        memory = (self.values.data_ptr(), self.index.data_ptr())
        nonzeros = torch.empty(self.taps, tiles, dtype=torch.int32, device="cpu")
        counts, starts = self.counts.chunk(self.taps), self.start[:-1].chunk(self.taps)
        sources = [matrix.data_ptr() + 4 * tap * across for tap in range(self.taps)]
        for tap, source in enumerate(sources):
            to = (counts[tap].data_ptr(), nonzeros[tap].data_ptr())
            in_parts(library.nm_bf16_count, (source, *shape, *to), tiles, size)
        self.start[1:] = self.counts.sum(2, dtype=torch.int32).flatten().cumsum(0)
        for tap, source in enumerate(sources):
            of = (counts[tap].data_ptr(), starts[tap].data_ptr())
            in_parts(library.nm_bf16_fill, (source, *shape, *of, *memory), tiles, size)
        return int(nonzeros.sum())

    def pack_both(self, weight: Tensor, other: Tensor | None, turned: Bf16Matrix) -> int:
        """As :meth:`nmrun.fast.cpu.kernels.products.PackedMatrix.pack_both`; rounded."""
        turned.pack(weight if other is None else other, turned=True)
        return self.pack(weight)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x S^T + bias``, with x (tokens, columns) in bfloat16; (tokens, rows) in bfloat16, rounded once.
        Raises RuntimeError where there are no such products."""
        library, x = KERNELS.load(), x.contiguous()
        tokens = len(x)
        out = x.new_empty(tokens, self.rows)
        bias = None if bias is None else bias.float().contiguous()
        operands: list[Any] = [*map(address, (x, out, bias))]
        operands += [*self.addresses, self.rows, self.columns]
        tiles, work = self.counts.shape[1], tokens * self.values.numel() // WORTH
        in_tokens_or_rows(library.nm_bf16, operands, tokens, tiles, work, TOKENS_A_PASS)
        return out

    def convolve(self, x: Tensor, out: Tensor, bias: Tensor | None, geometry: int) -> None:
        """See :func:`nmrun.fast.cpu.kernels.convolution.convolve`: images in bfloat16, channels last, a
        bias in float32, and where a ``Geometry`` lies."""
        pixels = out.shape[0] * out.shape[2] * out.shape[3]
        operands: list[Any] = [*map(address, (x, out, bias)), *self.addresses, geometry]
        operands += [x.shape[0], BEGIN, END]
        work = pixels * self.slots * SEGMENT // WORTH
        in_parts(KERNELS.load().nm_bf16_convolution, operands, pixels, work, TOKENS_A_PASS)

    def sampled(self, x: Tensor, y: Tensor) -> Tensor:
        """``y^T x`` where this matrix has non-zeros, zero elsewhere, in float32; x (tokens, columns) and
        y (tokens, rows) in bfloat16."""
        library, x, y = KERNELS.load(), x.contiguous(), y.contiguous()
        sums = torch.zeros(self.slots, SEGMENT, dtype=torch.float32, device="cpu")
        out = torch.zeros(self.rows, self.columns, dtype=torch.float32, device="cpu")
        operands: list[Any] = [
            x.data_ptr(),
            y.data_ptr(),
            *self.addresses,
            self.rows,
            self.columns,
            len(x),
        ]
        operands += [BEGIN, END, sums.data_ptr(), out.data_ptr()]
        tiles, work = self.counts.shape[1], len(x) * sums.numel() // WORTH
        in_parts(library.nm_bf16_sampled, operands, tiles, work)
        return out
