"""A linear layer for inference whose N:M weight is multiplied in bfloat16
(:mod:`nmrun.fast.cpu.kernels.bf16`), on processors that have the instruction.

Its state dict has ``values`` (slots, 32), ``index`` (slots, 32), ``counts`` (blocks, tiles, 16), and
``bias`` where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.packed_linear import PackedLinear, check_operands
from nmrun.fast.operators import over_tokens, register_operator


class Bf16Linear(PackedLinear):
    """``x W^T + bias`` with an N:M weight of bfloat16, on the CPU; other inputs are rounded to it."""

    MATRIX = Bf16Matrix

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Bf16Linear:
        """The layer of a weight (out_features, in_features) with zeros, rounded to bfloat16."""
        return cls(bf16.packed(weight.detach()), bias)

    def matrix(self, stored: Sequence[Tensor]) -> Any:
        values, index, counts = stored
        return Bf16Matrix.of(values.bfloat16(), index, counts, self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """From (..., in_features) to (..., out_features), in the dtype of the input."""
        parts = (self.values, self.index, self.counts, self.start, self.bias)
        shape = (self.out_features, self.in_features)
        return over_tokens(input, bf16_linear, _product, *parts, *shape)

    def dense(self) -> Tensor:
        """The weight with its zeros, bfloat16."""
        parts = (self.values, self.index, self.counts, self.start)
        return unpacked_bf16(*parts, self.out_features, self.in_features)


def _matrix(
    values: Tensor, index: Tensor, counts: Tensor, start: Tensor, rows: int, columns: int
) -> Bf16Matrix:
    # a model that is cast casts values as well
    return Bf16Matrix(values.bfloat16(), index, counts, start, rows, columns)


def _product(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, start: Tensor, bias: Tensor | None,
    rows: int, columns: int,
) -> Tensor:  # fmt: skip
    check_operands(x, values, columns)
    matrix = _matrix(values, index, counts, start, rows, columns)
    return bf16.multiply(x.bfloat16(), matrix, bias).to(x.dtype)


@torch.library.custom_op("nmrun::bf16_linear", mutates_args=())
def bf16_linear(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, start: Tensor, bias: Tensor | None,
    rows: int, columns: int,
) -> Tensor:  # fmt: skip
    return _product(x.detach(), values, index, counts, start, bias, rows, columns)


@torch.library.custom_op("nmrun::unpacked_bf16", mutates_args=())
def unpacked_bf16(
    values: Tensor, index: Tensor, counts: Tensor, start: Tensor, rows: int, columns: int
) -> Tensor:
    return _matrix(values, index, counts, start, rows, columns).dense()


@unpacked_bf16.register_fake
def _(values, index, counts, start, rows, columns):  # type: ignore[no-untyped-def]
    return values.new_empty(rows, columns, dtype=torch.bfloat16)


register_operator(bf16_linear, unpacked_bf16, 4)
