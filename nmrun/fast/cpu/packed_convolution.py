"""Convolutions for inference on the CPU whose N:M weight is packed, in the place of an ``nn.Conv2d``.

The state dict has ``values`` (count,), ``index`` (count,) and ``start`` (blocks * out_channels + 1,),
see :class:`nmrun.fast.cpu.kernels.products.PackedMatrix`. In bfloat16 it has ``values`` (slots, 32),
``index`` (slots, 32) and ``counts`` (blocks, tiles, 16), see
:class:`nmrun.fast.cpu.kernels.bf16.Bf16Matrix`. Both have ``bias`` where there is one. That of a
:class:`BlockConvolution` has them below ``linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from nmrun.fast.cpu.convolution import by_taps, empty_output
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.convolution import Pair, Window, convolve, numbered
from nmrun.fast.cpu.kernels.matrix import MATRICES, Matrix
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.cpu.packed_linear import (
    BlockLinear,
    PackedLayer,
    as_computed,
    check_input,
    unpacked,
)
from nmrun.fast.operators import followed, inference


class PackedConvolution(PackedLayer):
    """A convolution with an N:M weight, float32, on the CPU.

    Args:
        matrix: (out_channels, in_channels) for each position of the kernel, row by row.
        window: how the kernel moves.
        bias: (out_channels,), or None.
    """

    MATRIX: ClassVar[type[Matrix]] = PackedMatrix

    def __init__(self, matrix: Matrix, window: Window, bias: Tensor | None = None) -> None:
        super().__init__(matrix, bias)
        self.in_channels, self.out_channels = matrix.columns, matrix.rows
        self.window = window

    @classmethod
    def of(cls, weight: Tensor, window: Window, bias: Tensor | None = None) -> Self:
        """The layer of a weight (out_channels, in_channels, rows, columns) with zeros."""
        return cls(cls.MATRIX.packed(by_taps(weight), window.positions), window, bias)

    def forward(self, input: Tensor) -> Tensor:
        """From (images, in_channels, height, width) to (images, out_channels, height, width), channels
        last; or one image, without the first dimension. In the dtype of the input: float32, and in
        bfloat16 any, which is rounded. Under autocast in that of the weight."""
        if torch.is_autocast_enabled("cpu"):  # dense layers before this one have cast theirs
            input = input.to(self.values.dtype)
        batch = input if input.dim() == 4 else input.unsqueeze(0)
        call, kind = followed(input, packed_convolution, _convolved), self.MATRIX.__name__
        z = call(batch, self.parts(), self.bias, self.shape, kind, self.window.numbers)
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
    """The same with a weight of bfloat16, which is rounded, on processors that have the instruction."""

    MATRIX = Bf16Matrix


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
    def of(cls, weight: Tensor, window: Window, bias: Tensor | None = None) -> Self:
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


def _of_taps(matrix: Tensor, taps: Sequence[int]) -> Tensor:
    """A weight (out channels, channels, rows, columns), channels last, of its matrix."""
    return matrix.view(len(matrix), *taps, -1).permute(0, 3, 1, 2)


def _convolved(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, shape: Sequence[int], kind: str,
    window: Sequence[int],
) -> Tensor:  # fmt: skip
    matrix: Any = MATRICES[kind](parts, *shape)
    check_input(x, parts[0])
    low = as_computed(x, matrix, (torch.float32,))
    if x.dim() != 4 or x.shape[1] != matrix.columns:
        raise RuntimeError(f"x is {list(x.shape)} where the layer has {matrix.columns} channels")
    return convolve(low, matrix, bias, numbered(window)).to(x.dtype)


def _back(
    dz: Tensor, size: Sequence[int], parts: list[Tensor], bias: None, shape: Sequence[int], kind: str,
    window: Sequence[int],
) -> Tensor:  # fmt: skip
    weight, moves = unpacked(parts, shape, kind).to(dz.dtype), numbered(window)
    return conv2d_input(size, _of_taps(weight, moves.taps), dz, *moves.moves)


packed_convolution = inference(
    "packed_convolution",
    lambda x, parts, bias, shape, kind, window: empty_output(x, shape[0], window),
    _back,
)(_convolved)
