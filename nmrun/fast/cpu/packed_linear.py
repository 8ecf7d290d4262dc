"""Linear layers for inference on the CPU whose N:M weight is packed: in float32 or bfloat16, with
products in bfloat16, or in int8. They stand in the place of ``nn.Linear`` and Hugging Face's
``Conv1D``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import bf16, bitmaps, blocks, int8, products, tiles
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.bitmaps import BitmapMatrix
from nmrun.fast.cpu.kernels.blocks import BlockMatrix, Int8BlockMatrix
from nmrun.fast.cpu.kernels.int8 import Int8Matrix
from nmrun.fast.cpu.kernels.tiles import TiledMatrix
from nmrun.fast.cpu.packed_layer import PackedLayer, check_input
from nmrun.fast.operators import operator, over_tokens


class PackedLinear(PackedLayer):
    """``x W^T + bias`` with an N:M weight, float32 or bfloat16, on the CPU.

    The state dict has ``values`` (slots, 16), ``index`` (slots, 16) and ``counts`` (blocks, tiles, 8),
    see :class:`nmrun.fast.cpu.kernels.tiles.TiledMatrix`.

    Args:
        matrix: W, (out_features, in_features), a :attr:`MATRIX`.
        bias: (out_features,), or None.
    """

    MATRIX: ClassVar[Any] = TiledMatrix

    def __init__(self, matrix: Any, bias: Tensor | None = None) -> None:
        super().__init__(matrix, bias, (matrix.rows, matrix.columns))
        self.in_features, self.out_features = matrix.columns, matrix.rows

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """The layer of a weight (out_features, in_features) with zeros."""
        row, column = weight.nonzero(as_tuple=True)
        matrix = tiles.pack(row, column, weight.detach()[row, column], *weight.shape)
        return cls(matrix, bias)

    def forward(self, input: Tensor) -> Tensor:
        """From (..., in_features) to (..., out_features), in the dtype of the input, summed in float32."""
        kind = type(self).__name__
        return over_tokens(
            input, packed_linear, _product, self.parts(), self.bias, self.shape, kind
        )

    @staticmethod
    def multiply(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        """``x W^T + bias`` of tokens (tokens, in_features), in their dtype."""
        for tensor, name in ((x, "x"), (matrix.values, "weights")):
            if tensor.dtype not in products.DTYPES:
                raise RuntimeError(
                    f"{name} of {tensor.dtype}: packed layers take float32 and bfloat16"
                )
        return tiles.multiply(x, matrix, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Bf16Linear(PackedLinear):
    """``x W^T + bias`` with an N:M weight of bfloat16, on processors that multiply such numbers
    (:mod:`nmrun.fast.cpu.kernels.bf16`). Other inputs are rounded to them.

    The state dict has ``values`` (slots, 32), ``index`` (slots, 32) and ``counts`` (blocks, tiles, 16).
    """

    MATRIX, KEPT = Bf16Matrix, ("values",)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Bf16Linear:
        """The layer of a weight (out_features, in_features) with zeros, rounded to bfloat16."""
        return cls(bf16.packed(weight.detach()), bias)

    @staticmethod
    def multiply(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        return bf16.multiply(x.bfloat16(), matrix, bias).to(x.dtype)


class BlockLinear(PackedLinear):
    """``x W^T + bias`` with a V:N:M weight of bfloat16, on processors that multiply such numbers, by AMX
    where it is (:mod:`nmrun.fast.cpu.kernels.blocks`). Other inputs are rounded to them.

    The state dict has ``values`` (groups, V / 16, depth, 16, 32) and ``index`` (groups, 32 * depth).
    """

    MATRIX, KEPT = BlockMatrix, ("values",)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> BlockLinear:
        """The layer of a weight (out_features, in_features) with zeros, rounded to bfloat16.

        Raises:
            ValueError: where 16 rows side by side do not share their columns.
        """
        return cls(blocks.packed(weight.detach(), _height(weight)), bias)

    @staticmethod
    def multiply(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        return blocks.multiply(x.bfloat16(), matrix, bias).to(x.dtype)


class BitmapLinear(PackedLinear):
    """``x W^T + bias`` with any N:M weight of bfloat16 for few tokens, by AMX
    (:mod:`nmrun.fast.cpu.kernels.bitmaps`). Other inputs are rounded to bfloat16.

    The state dict has ``values`` (non-zeros,) and ``masks`` (tiles, depth, 16).
    """

    MATRIX, KEPT = BitmapMatrix, ("values",)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> BitmapLinear:
        """The layer of a weight (out_features, in_features) with zeros, rounded to bfloat16."""
        return cls(bitmaps.packed(weight.detach()), bias)

    @staticmethod
    def multiply(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        return bitmaps.multiply(x.bfloat16(), matrix, bias).to(x.dtype)


class Int8Linear(PackedLinear):
    """``x W^T + bias`` with an N:M weight of int8, on processors that multiply such numbers. It quantises
    its tokens itself (:mod:`nmrun.fast.cpu.kernels.int8` says how).

    The state dict has ``values`` (slots, 64), ``index`` (slots, 64), ``counts`` (tiles, segments) and
    ``scales`` (out_features,).

    Raises:
        RuntimeError: when called, for NaN and infinity in the input.
    """

    MATRIX: ClassVar[Any] = Int8Matrix
    KEPT = ("scales",)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """The layer of a weight (out_features, in_features) with zeros, rounded to int8.

        Raises:
            ValueError: for a weight with NaN or infinity.
        """
        row, column = weight.nonzero(as_tuple=True)
        value, scales = int8.quantised(row, weight.detach()[row, column], len(weight))
        return cls(int8.pack(row, column, value, scales, *weight.shape), bias)

    @staticmethod
    def multiply(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        return int8.multiply(x.float(), matrix, bias).to(x.dtype)


class Int8BlockLinear(Int8Linear):
    """The same of a V:N:M weight, by AMX where it is, with the same bits
    (:mod:`nmrun.fast.cpu.kernels.blocks`).

    The state dict has ``values`` (groups, V / 16, depth, 16, 64), ``index`` (groups, 64 * depth) and
    ``scales`` (out_features,).
    """

    MATRIX = Int8BlockMatrix

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int8BlockLinear:
        """The layer of a weight (out_features, in_features) with zeros, rounded to int8.

        Raises:
            ValueError: for a weight with NaN or infinity, and where 16 rows side by side do not
                share their columns.
        """
        return cls(blocks.packed_int8(weight.detach(), _height(weight)), bias)

    @staticmethod
    def multiply(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        return blocks.multiply_int8(x.float(), matrix, bias).to(x.dtype)


def _height(weight: Tensor) -> int:
    height = blocks.height_of(weight != 0)
    if height is None:
        raise ValueError("16 rows side by side keep more than three quarters of the columns")
    return height


# the layers by the name that the operators take
LAYERS = {
    layer.__name__: layer
    for layer in (PackedLinear, Bf16Linear, BlockLinear, BitmapLinear, Int8Linear, Int8BlockLinear)
}


def check_operands(x: Tensor, values: Tensor, columns: int) -> None:
    """Raise RuntimeError for an input of another width, and as :func:`check_input`."""
    check_input(x, values)
    if x.shape[-1] != columns:
        raise RuntimeError(f"x has {x.shape[-1]} features where the layer has {columns}")


def _product(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, shape: Sequence[int], kind: str
) -> Tensor:
    check_operands(x, parts[0], shape[1])
    layer, bias = LAYERS[kind], None if bias is None else bias.float()
    return layer.multiply(x, layer.MATRIX(*parts, *shape), bias)


@operator("packed_linear", lambda x, parts, bias, shape, kind: x.new_empty(x.shape[0], shape[0]))
def packed_linear(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, shape: Sequence[int], kind: str
) -> Tensor:
    return _product(x.detach(), parts, bias, shape, kind)


@operator("unpacked", lambda parts, shape, kind: parts[0].new_empty(shape, dtype=torch.float32))
def unpacked(parts: list[Tensor], shape: Sequence[int], kind: str) -> Tensor:
    """A packed weight with its zeros, float32."""
    dense: Tensor = LAYERS[kind].MATRIX(*parts, *shape).dense()
    return dense.float()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, _, ctx.shape, ctx.kind = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    dense = unpacked(parts, ctx.shape, ctx.kind)
    return dz @ dense.to(dz.dtype), [None] * len(parts), None, None, None


packed_linear.register_autograd(_backward, setup_context=_save)
