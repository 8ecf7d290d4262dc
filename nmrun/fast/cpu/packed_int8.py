"""A linear layer for inference whose N:M weight is int8; it quantises its tokens itself
(:mod:`nmrun.fast.cpu.kernels.int8` says how).

Its state dict has ``values`` (slots, 64), ``index`` (slots, 64), ``counts`` (tiles, segments),
``scales`` (out_features,), and ``bias`` where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.kernels.int8 import Int8Matrix
from nmrun.fast.cpu.packed_linear import PackedLinear, check_operands
from nmrun.fast.operators import over_tokens, register_operator

INT8 = "int8"
TOLERANCE = 0.05  # normal operands are 0.01 off; outliers among the inputs make it more


class Int8Linear(PackedLinear):
    """``x W^T + bias`` with an N:M weight of int8, on the CPU.

    Args:
        matrix: W, (out_features, in_features), an :class:`Int8Matrix`.
        bias: (out_features,), or None.
    """

    MATRIX = Int8Matrix
    scales: Tensor
    sums: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """The layer of a weight (out_features, in_features) with zeros, rounded to int8.

        Raises:
            ValueError: for a weight with NaN or infinity.
        """
        row, column = weight.nonzero(as_tuple=True)
        value, scales = int8.quantised(row, weight.detach()[row, column], len(weight))
        return cls(int8.pack(row, column, value, scales, *weight.shape), bias)

    def matrix(self, stored: Sequence[Tensor]) -> Any:
        values, index, counts, scales = stored
        shape = (self.out_features, self.in_features)
        return Int8Matrix.of(values, index, counts, scales.float(), *shape)

    def forward(self, input: Tensor) -> Tensor:
        """From (..., in_features) to (..., out_features), in the dtype of the input.

        Raises:
            RuntimeError: for NaN and infinity in the input.
        """
        parts = (self.values, self.index, self.counts, self.scales, self.start, self.sums)
        shape = (self.out_features, self.in_features)
        return over_tokens(input, int8_linear, _product, *parts, self.bias, *shape)

    def dense(self) -> Tensor:
        """The weight with its zeros, as it was rounded, float32."""
        parts = (self.values, self.index, self.counts, self.scales, self.start, self.sums)
        return unpacked_int8(*parts, self.out_features, self.in_features)


def _product(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, scales: Tensor, start: Tensor,
    sums: Tensor, bias: Tensor | None, rows: int, columns: int,
) -> Tensor:  # fmt: skip
    check_operands(x, values, columns)
    # a model that is cast casts scales as well
    matrix = Int8Matrix(values, index, counts, scales.float(), rows, columns, start, sums)
    return int8.multiply(x.float(), matrix, None if bias is None else bias.float()).to(x.dtype)


@torch.library.custom_op("nmrun::int8_linear", mutates_args=())
def int8_linear(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, scales: Tensor, start: Tensor,
    sums: Tensor, bias: Tensor | None, rows: int, columns: int,
) -> Tensor:  # fmt: skip
    return _product(x.detach(), values, index, counts, scales, start, sums, bias, rows, columns)


@torch.library.custom_op("nmrun::unpacked_int8", mutates_args=())
def unpacked_int8(
    values: Tensor, index: Tensor, counts: Tensor, scales: Tensor, start: Tensor, sums: Tensor,
    rows: int, columns: int,
) -> Tensor:  # fmt: skip
    return Int8Matrix(values, index, counts, scales.float(), rows, columns, start, sums).dense()


@unpacked_int8.register_fake
def _(values, index, counts, scales, start, sums, rows, columns):  # type: ignore[no-untyped-def]
    return values.new_empty(rows, columns, dtype=torch.float32)


register_operator(int8_linear, unpacked_int8, 6)
