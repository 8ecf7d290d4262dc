"""A linear layer for inference on the CPU whose N:M weight is packed in tiles.

It stands in the place of ``nn.Linear`` and Hugging Face's ``Conv1D``.

The state dict of a :class:`PackedLinear` has the tensors of a
:class:`nmrun.fast.cpu.kernels.tiles.TiledMatrix`: ``values`` (slots, 16), ``index`` (slots, 16) and
``counts`` (blocks, tiles, 8). It has ``bias`` where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import products, tiles
from nmrun.fast.cpu.kernels.tiles import TiledMatrix
from nmrun.fast.cpu.packed_layer import PackedLayer, check_on_cpu
from nmrun.fast.operators import over_tokens, register_operator


class PackedLinear(PackedLayer):
    """``x W^T + bias`` with an N:M weight, float32 or bfloat16, on the CPU.

    Args:
        matrix: W, (out_features, in_features), a :class:`TiledMatrix`.
        bias: (out_features,), or None.
    """

    MATRIX: ClassVar[Any] = TiledMatrix
    counts: Tensor
    same: int

    def __init__(self, matrix: Any, bias: Tensor | None = None) -> None:
        super().__init__(matrix, bias)
        self.in_features, self.out_features = matrix.columns, matrix.rows

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """The layer of a weight (out_features, in_features) with zeros."""
        row, column = weight.nonzero(as_tuple=True)
        matrix = tiles.pack(row, column, weight.detach()[row, column], *weight.shape)
        return cls(matrix, bias)

    def matrix(self, stored: Sequence[Tensor]) -> Any:
        values, index, counts = stored
        shape = (self.out_features, self.in_features)
        return TiledMatrix.of(values.to(self.values), index, counts, *shape)

    def forward(self, input: Tensor) -> Tensor:
        """From (..., in_features) to (..., out_features), in the dtype of the input, summed in float32."""
        parts = (self.values, self.index, self.counts, self.start, self.bias)
        shape = (self.out_features, self.in_features)
        return over_tokens(input, packed_linear, _product, *parts, *shape, self.same)

    def dense(self) -> Tensor:
        """The weight with its zeros."""
        parts = (self.values, self.index, self.counts, self.start)
        return unpacked(*parts, self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def check_operands(x: Tensor, values: Tensor, columns: int) -> None:
    """Raise RuntimeError for an input of another width, and for tensors that are not on the CPU."""
    check_on_cpu(x, values)
    if x.shape[-1] != columns:
        raise RuntimeError(f"x has {x.shape[-1]} features where the layer has {columns}")


def _product(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, start: Tensor, bias: Tensor | None,
    rows: int, columns: int, same: int,
) -> Tensor:  # fmt: skip
    check_operands(x, values, columns)
    for tensor, name in ((x, "x"), (values, "weights")):
        if tensor.dtype not in products.DTYPES:
            raise RuntimeError(f"{name} of {tensor.dtype}: packed layers take float32 and bfloat16")
    bias = None if bias is None else bias.float()
    return tiles.multiply(x, TiledMatrix(values, index, counts, rows, columns, start, same), bias)


@torch.library.custom_op("nmrun::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, start: Tensor, bias: Tensor | None,
    rows: int, columns: int, same: int,
) -> Tensor:  # fmt: skip
    return _product(x.detach(), values, index, counts, start, bias, rows, columns, same)


@torch.library.custom_op("nmrun::unpacked", mutates_args=())
def unpacked(
    values: Tensor, index: Tensor, counts: Tensor, start: Tensor, rows: int, columns: int
) -> Tensor:
    """A packed weight with its zeros."""
    return TiledMatrix(values, index, counts, rows, columns, start, 0).dense()


@unpacked.register_fake
def _(values, index, counts, start, rows, columns):  # type: ignore[no-untyped-def]
    return values.new_empty(rows, columns)


register_operator(packed_linear, unpacked, 4)
