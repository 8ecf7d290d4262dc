"""The packed weight of one layer in training on the CPU: what its products read.

It is packed once per optimizer step, in float32 (``nmrun.fast.cpu.kernels.products``) or in bfloat16
(``nmrun.fast.cpu.kernels.bf16``, of V:N:M ``nmrun.fast.cpu.kernels.blocks``): the weight for the forward product, its transpose for the input
gradient. Operators take the tensors of such a matrix, its parts, as a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor, nn

from nmrun.fast.cpu.kernels import bf16, blocks, products
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.blocks import BlockMatrix, BlockTranspose
from nmrun.fast.cpu.kernels.products import PackedMatrix

Matrix = PackedMatrix | Bf16Matrix | BlockMatrix | BlockTranspose
# by the dimensions of their values
OF_BLOCKS: dict[int, type[BlockMatrix | BlockTranspose]] = {5: BlockMatrix, 4: BlockTranspose}
PRODUCTS = ("forward", "backward")


class PackedWeight(nn.Module):
    """A weight (outputs, inputs) = ``shape``, or one for each of ``taps`` positions of a kernel, in
    buffers that keep their addresses and are no part of a state dict; empty until :meth:`pack`.
    """

    MATRIX: ClassVar[type[PackedMatrix | Bf16Matrix]] = PackedMatrix

    def __init__(self, shape: tuple[int, int], taps: int = 1) -> None:
        super().__init__()
        self.shape, self.taps = shape, taps
        self.names = dict[str, list[str]]()
        for kind in PRODUCTS:
            buffers = {f"{kind}_{part}": tensor for part, tensor in self.empty(kind).items()}
            self.names[kind] = list(buffers)
            for name, buffer in buffers.items():
                self.register_buffer(name, buffer, persistent=False)

    def empty(self, kind: str) -> dict[str, Tensor]:
        """What a product of ``PRODUCTS`` reads, by name, empty."""
        matrix = self.MATRIX.empty(*self._sides(kind), self.taps)
        return {part: getattr(matrix, part) for part in (*matrix.STORED, *matrix.DERIVED)}

    def parts(self, kind: str) -> list[Tensor]:
        """What a product of ``PRODUCTS`` reads."""
        return [getattr(self, name) for name in self.names[kind]]

    def matrix(self, kind: str) -> Any:
        """The same as a matrix."""
        return matrix_of(self.parts(kind), *self._sides(kind), self.taps)

    def pack(self, weight: Tensor, other: Tensor | None) -> int:
        """Take over a weight (outputs, taps * inputs), float32, and ``other`` for the input gradient.
        Returns how many non-zeros the weight has."""
        forward, backward = map(self.matrix, PRODUCTS)
        count: int = kernels_of(forward).pack_both(weight, other, forward, backward)
        return count

    def _sides(self, kind: str) -> tuple[int, int]:
        rows, columns = self.shape
        return (rows, columns) if kind == "forward" else (columns, rows)


def matrix_of(parts: Sequence[Tensor], rows: int, columns: int, taps: int = 1) -> Any:
    """The matrix that has these parts, a :data:`Matrix`."""
    if len(parts) == len((*Bf16Matrix.STORED, *Bf16Matrix.DERIVED)):
        values, index, counts, start = parts
        return Bf16Matrix(values, index, counts, start, rows, columns, taps)
    values, index, start = parts
    if kind := OF_BLOCKS.get(values.dim()):
        return kind(values, index, start, rows, columns)
    return PackedMatrix(values, index, start, rows, columns, taps)


def kernels_of(matrix: Matrix) -> ModuleType:
    """What packs such a matrix and multiplies with it."""
    if isinstance(matrix, BlockMatrix | BlockTranspose):
        return blocks
    return bf16 if isinstance(matrix, Bf16Matrix) else products
