"""A convolution through N:M products on the CPU, in float32 or bfloat16, as operators that autograd and
``torch.compile`` know: as :mod:`nmrun.fast.cpu.linear`, but the gradient of the weight is torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.convolution import Pair, Window, convolve, convolve_back
from nmrun.fast.cpu.weight import PRODUCTS, PackedWeight, matrix_of
from nmrun.fast.operators import PACKED
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
        w, parts = self.window, map(self.parts, PRODUCTS)
        z = convolution(x.to(self.dtype), weight, bias, *parts, w.stride, w.padding, w.dilation)
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


@torch.library.custom_op("nmrun::convolution_cpu", mutates_args=())
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, forward: list[Tensor], backward: list[Tensor],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    window = Window.of(weight.shape[2:], stride, padding, dilation)
    matrix = matrix_of(forward, weight.shape[0], weight.shape[1], window.positions)
    return convolve(x, matrix, bias, window)


@convolution.register_fake
def _(x, weight, bias, forward, backward, stride, padding, dilation):  # type: ignore[no-untyped-def]
    window = Window.of(weight.shape[2:], stride, padding, dilation)
    height, width = window.out(x.shape[2], x.shape[3])
    return x.new_empty((x.shape[0], height, width, weight.shape[0])).permute(0, 3, 1, 2)


@torch.library.custom_op("nmrun::convolution_back_cpu", mutates_args=())
def convolution_back(
    dz: Tensor, weight: Tensor, parts: list[Tensor], size: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """The gradient of an input of height and width ``size``."""
    window = Window.of(weight.shape[2:], stride, padding, dilation)
    matrix = matrix_of(parts, weight.shape[1], weight.shape[0], window.positions)
    return convolve_back(dz, matrix, window, (size[0], size[1]))


@convolution_back.register_fake
def _(dz, weight, parts, size, stride, padding, dilation):  # type: ignore[no-untyped-def]
    return dz.new_empty((dz.shape[0], size[0], size[1], weight.shape[1])).permute(0, 3, 1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, backward, *ctx.moves = inputs
    ctx.save_for_backward(x, weight, *backward)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    refuse_second_gradients(*PACKED)
    x, weight, *backward = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = convolution_back(dz, weight, backward, x.shape[2:], *ctx.moves)
    output_mask = [False, ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    # of the weight nothing but its shape and dtype is asked
    low = weight if weight.dtype == x.dtype else torch.empty_like(weight, dtype=x.dtype)
    bias = [weight.shape[0]] if ctx.bias_dtype else None
    stride, padding, dilation = ctx.moves
    _, dw, db = torch.ops.aten.convolution_backward(
        dz, x, low, bias, stride, padding, dilation, False, [0, 0], 1, output_mask
    )
    dw, db = (
        None if gradient is None else gradient.to(dtype)
        for gradient, dtype in ((dw, weight.dtype), (db, ctx.bias_dtype))
    )
    none = [None] * len(backward)
    return dx, dw, db, none, none, None, None, None


convolution.register_autograd(_backward, setup_context=_save)
