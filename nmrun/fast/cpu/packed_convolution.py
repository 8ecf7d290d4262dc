"""A convolution for inference on the CPU whose N:M weight is packed.

It stands in the place of an ``nn.Conv2d``. Its state dict has ``values`` (count,), ``index``
(count,) and ``start`` (blocks * out_channels + 1,), see
:class:`nmrun.fast.cpu.kernels.products.PackedMatrix`, and ``bias`` where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from nmrun.fast.cpu.convolution import by_taps
from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.convolution import Pair, Window, convolve
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.cpu.linear import PARTS


class PackedConvolution(nn.Module):
    """A convolution with an N:M weight, float32, on the CPU.

    Args:
        matrix: (out_channels, in_channels) for each position of the kernel, row by row.
        window: how the kernel moves.
        bias: (out_channels,), or None.
    """

    values: Tensor
    index: Tensor
    start: Tensor
    bias: Tensor | None

    def __init__(self, matrix: PackedMatrix, window: Window, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_channels, self.out_channels = matrix.columns, matrix.rows
        self.window = window
        for part in PARTS:
            self.register_buffer(part, getattr(matrix, part))
        self.register_buffer("bias", None if bias is None else bias.detach())

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        parts = [state.get(prefix + part) for part in PARTS]
        if all(isinstance(part, Tensor) for part in parts):
            shape = (self.out_channels, self.in_channels, self.window.positions)
            try:  # another weight of this shape may have another number of non-zeros
                PackedMatrix.of(parts, *shape).check()  # type: ignore[arg-type]
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.')}: {error}")
                return
            for name, part in zip(PARTS, parts, strict=True):
                setattr(self, name, part.to(getattr(self, name).device, copy=True))  # type: ignore[union-attr]
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)

    def forward(self, x: Tensor) -> Tensor:
        """x (images, in_channels, height, width) to (images, out_channels, height, width), channels
        last; or one image, without the first dimension. float32."""
        parts = (self.values, self.index, self.start, self.bias)
        batch, shape = x if x.dim() == 4 else x.unsqueeze(0), [self.out_channels, self.in_channels]
        # an operator is what a compiler and autograd know; the call alone is faster
        differentiated = x.requires_grad and torch.is_grad_enabled()
        call = packed_convolution if torch.compiler.is_compiling() or differentiated else _convolved
        z = call(batch, *parts, shape, *_moves(self.window))
        return z if batch is x else z.squeeze(0)

    def dense(self) -> Tensor:
        """The weight with its zeros, (out_channels, in_channels, rows, columns)."""
        shape = [self.out_channels, self.in_channels]
        return unpacked_convolution(
            self.values, self.index, self.start, shape, list(self.window.taps)
        )

    def extra_repr(self) -> str:
        w = self.window
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={w.taps}, stride={w.stride}, "
            f"padding={w.padding}, dilation={w.dilation}, bias={self.bias is not None}"
        )


def packed(weight: Tensor) -> PackedMatrix:
    """A weight (out_channels, in_channels, rows, columns) with zeros, float32, packed."""
    out, channels, height, width = weight.shape
    count = int(torch.count_nonzero(weight))
    matrix = PackedMatrix.empty(out, channels, count, height * width)
    products.pack(by_taps(weight), matrix)
    return matrix


def _moves(window: Window) -> tuple[list[int], ...]:
    return tuple(list(p) for p in (window.taps, window.stride, window.padding, window.dilation))


def _window(*moves: Sequence[int]) -> Window:
    taps, stride, padding, dilation = ((move[0], move[1]) for move in moves)
    return Window(taps, stride, padding, dilation)


def _size(x: Tensor, window: Window) -> Pair:
    return window.out(x.shape[2], x.shape[3])


def _convolved(
    x: Tensor, values: Tensor, index: Tensor, start: Tensor, bias: Tensor | None,
    shape: Sequence[int], taps: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    if x.device.type != "cpu" or values.device.type != "cpu":
        raise RuntimeError(
            f"these weights are packed for the CPU; x is on {x.device}, they on {values.device}"
        )
    for tensor, name in ((x, "x"), (values, "weights")):
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"{name} of {tensor.dtype}: packed convolutions take float32")
    rows, columns = shape
    if x.dim() != 4 or x.shape[1] != columns:
        raise RuntimeError(f"x is {list(x.shape)} where the layer has {columns} channels")
    window = _window(taps, stride, padding, dilation)
    if min(_size(x, window)) < 1:
        raise RuntimeError(f"x is {list(x.shape)}, smaller than the kernel of {window.taps}")
    matrix = PackedMatrix.of((values, index, start), rows, columns, window.positions)
    return convolve(x, matrix, bias, window)


@torch.library.custom_op("nmrun::packed_convolution", mutates_args=())
def packed_convolution(
    x: Tensor, values: Tensor, index: Tensor, start: Tensor, bias: Tensor | None,
    shape: Sequence[int], taps: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    return _convolved(
        x.detach(), values, index, start, bias, shape, taps, stride, padding, dilation
    )


@packed_convolution.register_fake
def _(x, values, index, start, bias, shape, *moves):  # type: ignore[no-untyped-def]
    size = _size(x, _window(*moves))
    return x.new_empty((x.shape[0], *size, shape[0])).permute(0, 3, 1, 2)


@torch.library.custom_op("nmrun::unpacked_convolution", mutates_args=())
def unpacked_convolution(
    values: Tensor, index: Tensor, start: Tensor, shape: Sequence[int], taps: Sequence[int]
) -> Tensor:
    """A packed weight with its zeros, channels last."""
    matrix = PackedMatrix.of((values, index, start), shape[0], shape[1], taps[0] * taps[1])
    return matrix.dense().view(shape[0], *taps, shape[1]).permute(0, 3, 1, 2)


@unpacked_convolution.register_fake
def _(values, index, start, shape, taps):  # type: ignore[no-untyped-def]
    return values.new_empty((shape[0], *taps, shape[1])).permute(0, 3, 1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, index, start, _, ctx.shape, ctx.taps, *ctx.moves = inputs
    ctx.save_for_backward(values, index, start)
    ctx.size = x.shape


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    weight = unpacked_convolution(*ctx.saved_tensors, ctx.shape, ctx.taps)
    dx = conv2d_input(ctx.size, weight, dz, *ctx.moves)
    return dx, *[None] * 9


packed_convolution.register_autograd(_backward, setup_context=_save)
