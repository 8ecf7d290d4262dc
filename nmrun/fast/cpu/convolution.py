"""A convolution through N:M products on the CPU, in float32 or bfloat16, as operators that autograd and
``torch.compile`` know: as :mod:`nmrun.fast.cpu.linear`, but the gradient of the weight is torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.convolution import (
    Pair,
    Window,
    convolve,
    convolve_back,
    numbered,
)
from nmrun.fast.cpu.linear import PRODUCTS, PackedWeight, matrix_of
from nmrun.fast.operators import PACKED, operator
from nmrun.products.simulation import refuse_second_gradients


def window_of(module: nn.Conv2d) -> Window:
    """Raises ValueError, which says why a convolution cannot be packed."""
    if module.groups != 1:
        raise ValueError("grouped convolutions are not packed")
    padding = module.padding
    if isinstance(padding, str):  # valid, or same, which may be wider on one side
        left, right, top, bottom = module._reversed_padding_repeated_twice
        padding = (top, left) if (top, left) == (bottom, right) else padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        raise ValueError(f"padding {module.padding_mode}, {module.padding} is not packed")
    return Window.of(module.kernel_size, module.stride, padding, module.dilation)


class ConvolutionProducts(PackedWeight):
    """The packed weight of one convolution, (out channels, channels) = ``shape`` for each position of
    the kernel."""

    dtype: torch.dtype = torch.float32

    def __init__(self, shape: Pair, window: Window) -> None:
        super().__init__(shape, window.positions)
        self.window = window

    @torch.no_grad()
    def write(self, weight: Tensor, other: Tensor | None, masked: bool = False) -> None:
        """Pack a weight (out channels, channels, rows, columns) in place of the old one. So is
        ``other``, the weight of the input gradient, where that is another. The weight gradient is whole,
        masked or not.
        """
        # a model may be cast after it was accelerated
        self.pack(by_taps(weight.float()), None if other is None else by_taps(other.float()))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (images, channels, height, width) to (images, out channels, height, width), stored as torch
        stores it: with channels last where x or the weight is. ``weight`` is not read: it receives the
        gradient."""
        parts, window = map(self.parts, PRODUCTS), self.window.numbers
        z = convolution(x.to(self.dtype), weight, bias, *parts, window)
        # a network may take a view of what torch stores image by image
        return z if has_channels_last(x) or has_channels_last(weight) else z.contiguous()


class Bf16ConvolutionProducts(ConvolutionProducts):
    """The same with products in bfloat16, which the processor has to have; the weight is rounded."""

    dtype, MATRIX = torch.bfloat16, Bf16Matrix


def has_channels_last(t: Tensor) -> bool:
    """Whether images or a weight are stored so, and not image by image too, as single pixels are."""
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def by_taps(weight: Tensor) -> Tensor:
    """A weight as (out channels, taps * channels), contiguous: no copy of a weight with channels last."""
    return weight.detach().permute(0, 2, 3, 1).contiguous().flatten(1)


def _images(x: Tensor, height: int, width: int, channels: int) -> Tensor:
    """Empty images, channels last."""
    return x.new_empty((x.shape[0], height, width, channels)).permute(0, 3, 1, 2)


def empty_output(x: Tensor, channels: int, window: Sequence[int]) -> Tensor:
    """An empty output for images x, channels last."""
    height, width = numbered(window).out(x.shape[2], x.shape[3])
    return _images(x, height, width, channels)


@operator(
    "convolution_cpu",
    lambda x, weight, bias, forward, backward, window: empty_output(x, len(weight), window),
)
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, forward: list[Tensor], backward: list[Tensor],
    window: Sequence[int],
) -> Tensor:  # fmt: skip
    moves = numbered(window)
    matrix = matrix_of(forward, weight.shape[0], weight.shape[1], moves.positions)
    return convolve(x, matrix, bias, moves)


@operator(
    "convolution_back_cpu",
    lambda dz, weight, parts, size, window: _images(dz, size[0], size[1], weight.shape[1]),
)
def convolution_back(
    dz: Tensor, weight: Tensor, parts: list[Tensor], size: Sequence[int], window: Sequence[int]
) -> Tensor:
    """The gradient of an input of height and width ``size``."""
    moves = numbered(window)
    matrix = matrix_of(parts, weight.shape[1], weight.shape[0], moves.positions)
    return convolve_back(dz, matrix, moves, (size[0], size[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, backward, ctx.window = inputs
    ctx.save_for_backward(x, weight, *backward)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    refuse_second_gradients(*PACKED)
    x, weight, *backward = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = None
    if needs_x:
        dx = convolution_back(dz, weight, backward, x.shape[2:], ctx.window)
    # of the weight nothing but its shape and dtype is asked
    low = weight if weight.dtype == x.dtype else torch.empty_like(weight, dtype=x.dtype)
    bias = [weight.shape[0]] if ctx.bias_dtype else None
    how = (*numbered(ctx.window).moves, False, [0, 0], 1, [False, needs_weight, needs_bias])
    _, dw, db = torch.ops.aten.convolution_backward(dz, x, low, bias, *how)
    dw = None if dw is None else dw.to(weight.dtype)
    db = None if db is None else db.to(ctx.bias_dtype)
    none = [None] * len(backward)
    return dx, dw, db, none, none, None


convolution.register_autograd(_backward, setup_context=_save)
