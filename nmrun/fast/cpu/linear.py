"""A linear layer through N:M products on the CPU, as operators that autograd and ``torch.compile``
know.

    Z = X W^T       sparse
    dX = dZ V       sparse: V^T is packed too, and needs no pattern; V is W unless the recipe has
                    another
    dW = dZ^T X     dense, by torch or by oneDNN; the kept entries alone where the recipe masks the
                    gradients of pruned weights; with MVUE E^T X with the N:M estimate E of dZ

:class:`LinearProducts` holds what the products read, in float32 (``nmrun.fast.cpu.kernels.products``).
:class:`Bf16Products` does so in bfloat16 (``nmrun.fast.cpu.kernels.bf16``), :class:`Bf16Forward` the
forward product alone: where many weights are kept, the transpose fills its slots too unevenly.
:class:`BlockProducts` does so for V:N:M weights (``nmrun.fast.cpu.kernels.blocks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nmrun.fast.cpu import onednn
from nmrun.fast.cpu.kernels import blocks
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.blocks import BlockMatrix, BlockTranspose
from nmrun.fast.cpu.kernels.matrix import Matrix
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.cpu.kernels.tiles import TILE
from nmrun.fast.measurement import ONEDNN
from nmrun.fast.operators import operator, training
from nmrun.patterns import COLUMNS, Pattern
from nmrun.products.simulation import estimate

DENSE, SAMPLED = "dense", "sampled"  # ways to compute a weight gradient, beside ONEDNN
PRODUCTS = ("forward", "backward")
# matrices in training, by the dimensions of their values
BY_DIMENSIONS: dict[int, type[Matrix]] = {
    1: PackedMatrix,
    2: Bf16Matrix,
    5: BlockMatrix,
    4: BlockTranspose,
}


def matrix_of(parts: Sequence[Tensor], rows: int, columns: int, taps: int = 1) -> Any:
    """The matrix that has these parts."""
    return BY_DIMENSIONS[parts[0].dim()](parts, rows, columns, taps)


class PackedWeight(nn.Module):
    """The packed weight of one layer in training, (outputs, inputs) = ``shape``, or one for each of ``taps``
    positions of a kernel: the weight for the forward product, its transpose for the input gradient. It is
    packed once per optimizer step, in buffers that keep their addresses and are no part of a state dict;
    empty until :meth:`pack`. Operators take the tensors of such a matrix, its parts, as a list.
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
        return self.MATRIX.empty(*self.sides(kind), self.taps).named()

    def sides(self, kind: str) -> tuple[int, int]:
        """The shape of what it reads."""
        rows, columns = self.shape
        return (rows, columns) if kind == "forward" else (columns, rows)

    def parts(self, kind: str) -> list[Tensor]:
        """What it reads."""
        return [getattr(self, name) for name in self.names[kind]]

    def matrix(self, kind: str) -> Any:
        """The same as a matrix."""
        return matrix_of(self.parts(kind), *self.sides(kind), self.taps)

    def pack(self, weight: Tensor, other: Tensor | None) -> int:
        """Take over a weight (outputs, taps * inputs), float32, and ``other`` for the input gradient.
        Returns how many non-zeros the weight has."""
        forward, backward = map(self.matrix, PRODUCTS)
        count: int = forward.pack_both(weight, other, backward)
        return count


class LinearProducts(PackedWeight):
    """The packed weight of one layer, (outputs, inputs) = ``shape``. Values and sums are float32 with
    either ``dtype`` of the products.

    ``gradient_is_faster``: the kept entries of the weight gradient take less time than the dense one,
    which is computed by ``dense``, that is torch (``dense``) or ``onednn``.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        pattern: Pattern,
        gradient_is_faster: bool = False,
        dense: str = DENSE,
    ) -> None:
        self.pattern = pattern
        super().__init__(shape)
        self.dtype = dtype
        self.gradient_is_faster, self.dense, self.gradient = gradient_is_faster, dense, dense
        rows, columns = shape
        whole, rest = divmod(columns, pattern.m)
        self.full = rows * (whole * self.kept + min(rest, self.kept))  # where no kept weight is 0

    @property
    def kept(self) -> int:
        """Entries of a row in M columns."""
        return self.pattern.n

    @torch.no_grad()
    def write(self, weight: Tensor, other: Tensor | None, masked: bool = False) -> None:
        """Pack a weight (outputs, inputs) in place of the old one, and ``other`` for the input
        gradient. ``masked``: the gradients of pruned weights are not needed; kept weights that are 0 need
        theirs, so where there are any, all are computed."""
        # a model may be cast after it was accelerated
        count = self.pack(
            weight.detach().float(), None if other is None else other.detach().float()
        )
        # a backward pass of an earlier step raises, as with a dense weight
        torch.autograd.graph.increment_version(list(self.buffers()))
        sampled = masked and self.gradient_is_faster and count == self.full
        self.gradient = SAMPLED if sampled else self.dense

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mvue: Pattern | None = None
    ) -> Tensor:
        """x (..., inputs) to (..., outputs). ``weight`` is not read: it receives the gradient."""
        x = x.to(self.dtype)
        gradient = self.gradient if mvue is None else str(mvue)
        flat = x.reshape(-1, x.shape[-1])
        z = linear(flat, weight, bias, *map(self.parts, PRODUCTS), gradient)
        return z.view(*x.shape[:-1], z.shape[-1])


class Bf16Products(LinearProducts):
    """The same with products in bfloat16, which the processor has to have; the weight is rounded."""

    MATRIX = Bf16Matrix


class Bf16Forward(Bf16Products):
    """The same with a dense input gradient, of the weight in bfloat16, by torch."""

    backward_weight: Tensor

    def empty(self, kind: str) -> dict[str, Tensor]:
        if kind == "forward":
            return super().empty(kind)
        return {"weight": torch.empty(self.shape, dtype=torch.bfloat16, device="cpu")}

    def pack(self, weight: Tensor, other: Tensor | None) -> int:
        self.backward_weight.copy_(weight if other is None else other)
        count: int = self.matrix("forward").pack(weight)
        return count


class BlockProducts(LinearProducts):
    """The same with products in bfloat16 of a V:N:M weight, of whose V 16 is a divisor. A weight gradient
    of kept entries has all of the columns that a block keeps."""

    @property
    def height(self) -> int:
        return blocks.height_in(self.pattern) or TILE

    @property
    def kept(self) -> int:
        return COLUMNS

    def empty(self, kind: str) -> dict[str, Tensor]:
        matrix: type[BlockMatrix | BlockTranspose] = BlockTranspose
        if kind == "forward":
            matrix = BlockMatrix
        return matrix.empty(*self.sides(kind), self.height).named()


@operator("multiply_cpu", lambda x, parts, rows: x.new_empty(x.shape[0], rows))
def multiply(x: Tensor, parts: list[Tensor], rows: int) -> Tensor:
    """x S^T, (tokens, rows); of one part, the dense matrix (columns, rows), x S."""
    if len(parts) == 1:
        return x @ parts[0]
    product: Tensor = matrix_of(parts, rows, x.shape[1]).multiply(x)
    return product


@operator(
    "sampled_cpu", lambda dz, x, parts: x.new_empty(dz.shape[1], x.shape[1], dtype=torch.float32)
)
def sampled(dz: Tensor, x: Tensor, parts: list[Tensor]) -> Tensor:
    """``dz^T x`` at the entries of a packed (outputs, inputs) matrix, zero elsewhere; float32."""
    gradient: Tensor = matrix_of(parts, dz.shape[1], x.shape[1]).sampled(x, dz)
    return gradient


def weight_gradient(dz: Tensor, x: Tensor, forward: list[Tensor], gradient: str) -> Tensor:
    """dW (outputs, inputs) as ``gradient`` of :func:`linear` says."""
    if gradient == SAMPLED:
        return sampled(dz, x, forward)
    if gradient == ONEDNN:
        return onednn.product(dz.t(), x.t())
    if gradient != DENSE:
        dz = estimate(dz, Pattern.parse(gradient))
    return dz.t() @ x


@training(
    "linear_cpu",
    lambda x, weight, bias, forward, backward, gradient: x.new_empty(x.shape[0], weight.shape[0]),
    lambda dz, x, backward, gradient: multiply(dz, backward, x.shape[1]),
    weight_gradient,
)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, forward: list[Tensor], backward: list[Tensor],
    gradient: str,
) -> Tensor:  # fmt: skip
    """``x W^T + bias``, (tokens, outputs); ``gradient`` is how dW is computed: ``dense``,
    ``onednn``, ``sampled``, or N:M for that of an estimate."""
    product: Tensor = matrix_of(forward, *weight.shape).multiply(x, bias)
    return product
