"""Convolutions for inference on the CPU whose N:M weight is packed, in the place of an ``nn.Conv2d``.

The state dict has ``values`` (count,), ``index`` (count,) and ``start`` (blocks * out_channels + 1,),
see :class:`nmrun.fast.cpu.kernels.products.PackedMatrix`. In bfloat16 it has ``values`` (slots, 32),
``index`` (slots, 32) and ``counts`` (blocks, tiles, 16), see
:class:`nmrun.fast.cpu.kernels.bf16.Bf16Matrix`. Both have ``bias`` where there is one. That of a
:class:`BlockConvolution` has them below ``linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from nmrun.fast.cpu.convolution import by_taps
from nmrun.fast.cpu.kernels import bf16, products
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.convolution import Pair, Window, convolve
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.cpu.packed_layer import PackedLayer, check_input
from nmrun.fast.cpu.packed_linear import BlockLinear
from nmrun.fast.cpu.weight import matrix_of
from nmrun.fast.operators import followed


class PackedConvolution(PackedLayer):
    """A convolution with an N:M weight, float32, on the CPU.

    Args:
        matrix: (out_channels, in_channels) for each position of the kernel, row by row.
        window: how the kernel moves.
        bias: (out_channels,), or None.
    """

    MATRIX: ClassVar[Any] = PackedMatrix

    def __init__(self, matrix: Any, window: Window, bias: Tensor | None = None) -> None:
        super().__init__(matrix, bias, (matrix.rows, matrix.columns, matrix.taps))
        self.in_channels, self.out_channels = matrix.columns, matrix.rows
        self.window = window

    @classmethod
    def of(cls, weight: Tensor, window: Window, bias: Tensor | None = None) -> PackedConvolution:
        """The layer of a weight (out_channels, in_channels, rows, columns) with zeros."""
        return cls(packed(weight), window, bias)

    def forward(self, input: Tensor) -> Tensor:
        """From (images, in_channels, height, width) to (images, out_channels, height, width), channels
        last; or one image, without the first dimension. In the dtype of the input: float32, and in
        bfloat16 any, which is rounded. Under autocast in that of the weight."""
        if torch.is_autocast_enabled("cpu"):  # dense layers before this one have cast theirs
            input = input.to(self.values.dtype)
        batch = input if input.dim() == 4 else input.unsqueeze(0)
        call = followed(input, packed_convolution, _convolved)
        z = call(batch, self.parts(), self.bias, self.shape[:2], *_moves(self.window))
        return z if batch is input else z.squeeze(0)

    def dense(self) -> Tensor:
        """The weight with its zeros, (out_channels, in_channels, rows, columns)."""
        return _of_taps(super().dense(), self.window.taps)

    def extra_repr(self) -> str:
        w = self.window
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={w.taps}, stride={w.stride}, "
            f"padding={w.padding}, dilation={w.dilation}, bias={self.bias is not None}"
        )


class Bf16Convolution(PackedConvolution):
    """The same with a weight of bfloat16, on processors that have the instruction."""

    MATRIX, KEPT = Bf16Matrix, ("values",)

    @classmethod
    def of(cls, weight: Tensor, window: Window, bias: Tensor | None = None) -> PackedConvolution:
        """The layer of a weight (out_channels, in_channels, rows, columns) with zeros, rounded."""
        return cls(bf16.packed(by_taps(weight), window.positions), window, bias)


class BlockConvolution(nn.Module):
    """A convolution of one position with a V:N:M weight of bfloat16: the linear layer of the pixels.

    Args:
        linear: from the channels of a pixel to those of its output.
        stride: rows and columns from one pixel to the next.
    """

    def __init__(self, linear: BlockLinear, stride: Pair) -> None:
        super().__init__()
        self.linear, self.stride = linear, stride

    @classmethod
    def of(cls, weight: Tensor, window: Window, bias: Tensor | None = None) -> BlockConvolution:
        """The layer of a weight (out_channels, in_channels, 1, 1) with zeros, rounded to bfloat16.

        Raises:
            ValueError: where 16 rows side by side do not share their columns.
        """
        return cls(BlockLinear.of(weight.flatten(1), bias), window.stride)

    def forward(self, input: Tensor) -> Tensor:
        """As :meth:`PackedConvolution.forward`."""
        pixels = input[..., :: self.stride[0], :: self.stride[1]].movedim(-3, -1)
        return self.linear(pixels).movedim(-1, -3)

    def dense(self) -> Tensor:
        """The weight with its zeros, (out_channels, in_channels, 1, 1)."""
        return self.linear.dense()[..., None, None]


def packed(weight: Tensor) -> PackedMatrix:
    """A weight (out_channels, in_channels, rows, columns) with zeros, float32, packed, without room
    behind it."""
    out, channels, height, width = weight.shape
    full = PackedMatrix.empty(out, channels, height * width)
    products.pack(by_taps(weight), full)
    values, index = (t[: full.count].clone() for t in (full.values, full.index))
    return PackedMatrix(values, index, full.start, out, channels, height * width)


def _of_taps(matrix: Tensor, taps: Sequence[int]) -> Tensor:
    """A weight (out channels, channels, rows, columns), channels last, of its matrix."""
    return matrix.view(len(matrix), *taps, -1).permute(0, 3, 1, 2)


def _moves(window: Window) -> tuple[list[int], ...]:
    return tuple(list(p) for p in (window.taps, window.stride, window.padding, window.dilation))


def _size(x: Tensor, window: Window) -> Pair:
    return window.out(x.shape[2], x.shape[3])


def _convolved(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, shape: Sequence[int], taps: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    window, values = Window.of(taps, stride, padding, dilation), parts[0]
    matrix = matrix_of(parts, shape[0], shape[1], window.positions)
    low = isinstance(matrix, Bf16Matrix)
    check_input(x, values)
    for tensor, name in () if low else ((x, "x"), (values, "weights")):
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"{name} of {tensor.dtype}: packed convolutions take float32")
    if x.dim() != 4 or x.shape[1] != matrix.columns:
        raise RuntimeError(f"x is {list(x.shape)} where the layer has {matrix.columns} channels")
    return convolve(x.bfloat16() if low else x, matrix, bias, window).to(x.dtype)


@torch.library.custom_op("nmrun::packed_convolution", mutates_args=())
def packed_convolution(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, shape: Sequence[int], taps: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    return _convolved(x.detach(), parts, bias, shape, taps, stride, padding, dilation)


@packed_convolution.register_fake
def _(x, parts, bias, shape, *moves):  # type: ignore[no-untyped-def]
    size = _size(x, Window.of(*moves))
    return x.new_empty((x.shape[0], *size, shape[0])).permute(0, 3, 1, 2)


@torch.library.custom_op("nmrun::unpacked_convolution", mutates_args=())
def unpacked_convolution(parts: list[Tensor], shape: Sequence[int], taps: Sequence[int]) -> Tensor:
    """A packed weight with its zeros, channels last."""
    matrix = matrix_of(parts, shape[0], shape[1], taps[0] * taps[1])
    return _of_taps(matrix.dense(), taps)


@unpacked_convolution.register_fake
def _(parts, shape, taps):  # type: ignore[no-untyped-def]
    return parts[0].new_empty((shape[0], *taps, shape[1])).permute(0, 3, 1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, parts, _, ctx.shape, ctx.taps, *ctx.moves = inputs
    ctx.save_for_backward(*parts)
    ctx.size = x.shape


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    weight = unpacked_convolution(list(ctx.saved_tensors), ctx.shape, ctx.taps)
    dx = conv2d_input(ctx.size, weight.to(dz.dtype), dz, *ctx.moves)
    return dx, [None] * len(ctx.saved_tensors), *[None] * 6


packed_convolution.register_autograd(_backward, setup_context=_save)
