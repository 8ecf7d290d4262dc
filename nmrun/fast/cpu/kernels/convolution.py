"""Convolutions with an N:M weight on the CPU: ``nm_convolution.c`` in float32, whose images lie in
the lanes, so that it takes a batch to be fast; ``nm_bf16_convolution.c`` in bfloat16, whose outputs do.

Any kernel, stride, padding and dilation of two dimensions is right. Nothing is padded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.products import WORTH, PackedMatrix
from nmrun.kernels.compiler import BEGIN, END, address, in_parts

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """How a kernel moves over an image, (rows, columns) each."""

    taps: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @classmethod
    def of(cls, *moves: Sequence[int]) -> Window:
        """From taps, stride, padding and dilation as modules have them."""
        taps, stride, padding, dilation = ((move[0], move[1]) for move in moves)
        return cls(taps, stride, padding, dilation)

    @property
    def moves(self) -> tuple[Pair, Pair, Pair]:
        """Stride, padding and dilation."""
        return self.stride, self.padding, self.dilation

    @property
    def numbers(self) -> list[int]:
        """All of it, as operators take it."""
        return [*self.taps, *self.stride, *self.padding, *self.dilation]

    @property
    def positions(self) -> int:
        """How many taps the kernel has."""
        return self.taps[0] * self.taps[1]

    def out(self, height: int, width: int) -> Pair:
        """The size of the output for an input of this size. Raises RuntimeError for one that is smaller
        than the kernel."""
        h, w = (
            (size + 2 * self.padding[i] - self.dilation[i] * (self.taps[i] - 1) - 1)
            // self.stride[i] + 1
            for i, size in enumerate((height, width))
        )  # fmt: skip
        if h < 1 or w < 1:
            raise RuntimeError(
                f"an image of {height}x{width} is smaller than the kernel of {self.taps}"
            )
        return h, w


class _Geometry(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in
          ("height", "width", "columns", "out_height", "out_width", "rows")),
        ("window", ctypes.c_int64 * 8),  # taps, stride, padding, dilation
        ("backward", ctypes.c_int64),
    ]  # fmt: skip


def numbered(window: Sequence[int]) -> Window:
    """The inverse of :attr:`Window.numbers`."""
    a, b, c, d, e, f, g, h = window
    return Window((a, b), (c, d), (e, f), (g, h))


def convolve(
    x: Tensor, weight: PackedMatrix | Bf16Matrix, bias: Tensor | None, window: Window
) -> Tensor:
    """Convolve x (images, channels, height, width), read with channels last: float32, or bfloat16 with a
    :class:`Bf16Matrix`. The weight is (out channels, channels) for each tap, row by row of the kernel.
    Returns (images, out channels, height, width), channels last."""
    height, width = window.out(x.shape[2], x.shape[3])
    return _run(x, weight, bias, window, height, width, backward=False)


def convolve_back(
    dz: Tensor, weight: PackedMatrix | Bf16Matrix, window: Window, size: Pair
) -> Tensor:
    """The gradient of the input of :func:`convolve`, of height and width ``size``, channels last; the
    weight is the transpose of every tap, (channels, out channels) each."""
    return _run(dz, weight, None, window, *size, backward=True)


def _run(
    x: Tensor, weight: PackedMatrix | Bf16Matrix, bias: Tensor | None, window: Window, height: int,
    width: int, backward: bool,
) -> Tensor:  # fmt: skip
    images, columns, in_height, in_width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    # no view, which autograd would let nobody write in place
    size = (images, weight.rows, height, width)
    out = torch.empty(size, dtype=x.dtype, device="cpu", memory_format=torch.channels_last)
    bias = None if bias is None else bias.float().contiguous()
    sizes = (in_height, in_width, columns, height, width, weight.rows)
    geometry = _Geometry(*sizes, (ctypes.c_int64 * 8)(*window.numbers), backward)
    if isinstance(weight, Bf16Matrix):
        weight.convolve(x, out, bias, ctypes.addressof(geometry))
    else:
        _by_images(x, out, bias, weight, geometry)
    return out


def _by_images(
    x: Tensor, out: Tensor, bias: Tensor | None, weight: PackedMatrix, geometry: _Geometry
) -> None:
    library, (images, columns, in_height, in_width) = products.KERNELS.load(), x.shape
    about, height = ctypes.addressof(geometry), out.shape[2]
    pixels = in_height * in_width
    most = library.nm_images()
    size = pixels * columns * library.nm_lanes(min(images, most))
    turned = _workspace(size)
    parts = [t.data_ptr() for t in (weight.values, weight.index, weight.start)]
    bias_at = address(bias)
    work = min(images, most) * weight.count * height * out.shape[3] // WORTH
    for first in range(0, images, most):
        panel = (first, min(first + most, images))
        turn = (x.data_ptr(), about, *panel, BEGIN, END, turned.data_ptr())
        in_parts(library.nm_turn, turn, pixels, size // 8)
        convolve = (turned.data_ptr(), out.data_ptr(), bias_at, *parts, about, *panel, BEGIN, END)
        in_parts(library.nm_convolution, convolve, height, work)


KEPT = 1 << 26  # floats, 256 MB
_storage = threading.local()


def _workspace(floats: int) -> Tensor:
    """Memory of this thread that stays, up to ``KEPT``: fresh one costs a page fault every 4 KB, which
    takes up to half as long as the convolution."""
    memory: Tensor | None = getattr(_storage, "memory", None)
    if memory is None or len(memory) < floats:
        memory = torch.empty(floats, dtype=torch.float32, device="cpu")
        if floats <= KEPT:
            _storage.memory = memory
    return memory
