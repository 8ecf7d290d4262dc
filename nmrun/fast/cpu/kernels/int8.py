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
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels.tiles import TILE, SlotMatrix
from nmrun.kernels.compiler import SAME_BITS, CFunctions, address, in_tokens_or_rows

DEEP = 4  # non-zeros of a row in a slot, as in nm_int8.c
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


class Int8Matrix(SlotMatrix):
    """Four non-zeros of each row of a tile in a slot, in int8, and all segments in one block.

    Attributes:
        scales: (rows,), float32.
        sums: int32, (tiles * 16): of the values of a row.
    """

    SEGMENT, SEGMENTS = 64, 0
    STORED = ("values", "index", "counts", "scales")
    DERIVED = ("start", "sums")
    KEPT, COMPUTES = ("scales",), torch.float32
    scales: Tensor
    sums: Tensor

    @classmethod
    def packed(cls, weight: Tensor, taps: int = 1) -> Self:
        """Rounded. Raises ValueError for values that are not finite."""
        return cls.of_rounded(*rounded(weight))

    @classmethod
    def of_rounded(cls, weight: Tensor, scales: Tensor) -> Self:
        """A weight as int8, with the scales of its rows."""
        return cls.of([*cls.in_slots(weight), scales], *weight.shape)

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        (start,), (values, *_, scales) = super().derived(stored, rows, columns, taps), stored
        check_scales(values, scales, rows)
        slots = start.diff()
        check_row(int(slots.max() if len(slots) else 0) * DEEP)
        slot_sums = values.view(-1, TILE, DEEP).sum(2, dtype=torch.int32)
        tile = torch.arange(len(slots), device="cpu").repeat_interleave(slots)
        sums = torch.zeros(len(slots), TILE, dtype=torch.int32, device="cpu").index_add_(
            0, tile, slot_sums
        )
        return [start, sums.flatten()]

    def dense(self) -> Tensor:
        """The matrix with its zeros, float32."""
        return super().dense().float() * self.scales[:, None]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x S^T + bias``, all float32: x (tokens, columns), the result (tokens, rows).

        Raises RuntimeError for NaN and infinity in x, and where there are no such products.
        """
        library, x, tokens = KERNELS.load(), x.contiguous(), len(x)
        out = x.new_empty(tokens, self.rows)
        bias = None if bias is None else bias.contiguous()
        odd = ctypes.c_int32(0)
        values, index, counts, scales, start, sums = self.addresses
        operands = [*map(address, (x, out, bias))]
        operands += [values, index, counts, start, scales, sums]
        operands += [ctypes.addressof(odd), self.rows, self.columns]
        tiles, work = len(self.counts), tokens * self.values.numel() // WORTH
        in_tokens_or_rows(library.nm_int8, operands, tokens, tiles, work, TOKENS_A_PASS)
        check_finite(odd)
        return out


def check_scales(values: Tensor, scales: Tensor, rows: int) -> None:
    """Raise ValueError for a matrix that is not of int8 with a scale for each row."""
    if values.dtype != torch.int8 or scales.shape != (rows,) or scales.dtype != torch.float32:
        raise ValueError(f"{values.dtype} values with {list(scales.shape)} {scales.dtype} scales")


def check_row(nonzeros: int) -> None:
    """Raise ValueError for rows whose sums might overflow."""
    if nonzeros > ROW:
        raise ValueError(f"rows of {nonzeros} non-zeros: 32 bits add up {ROW}")


def check_finite(odd: ctypes.c_int32) -> None:
    """Raise RuntimeError where a product has found a token that it cannot round."""
    if odd.value:
        raise RuntimeError("int8 products: the activations have NaN or infinity")


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8, and the scale of each row. Raises ValueError for values that are not finite."""
    if not bool(weight.isfinite().all()):
        raise ValueError("int8: the weight has NaN or infinity")
    scales = (weight.float().abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales
