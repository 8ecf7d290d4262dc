"""Whether N:M products are right and faster than dense ones for a layer on this processor: tested
and timed once a shape, and remembered on disk.
"""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.kernels.cpu_convolution import Window
from nmrun.patterns import Pattern
from nmrun.products import convolution_cpu, linear_cpu
from nmrun.products.backends24 import fault
from nmrun.products.linear_cpu import Packed
from nmrun.products.simulated import estimate
from nmrun.products.times import Times, recall, remember
from nmrun.sparsity.masks import hard_threshold

FILE, PATHS = "probe_cpu.json", ("dense", "packed")
DTYPES = (torch.float32, torch.bfloat16)
# multiplications of one product below which a layer is left alone: some 0.2 ms, where what
# Python does around an operator eats the gain
SMALLEST = 1 << 24
ROUNDS = 9


@dataclass(frozen=True)
class Shape:
    """A linear layer in training: rows = outputs, columns = inputs, tokens of one micro-batch.

    ``mvue``: the pattern of an estimate of the output's gradient along the tokens, or None.
    """

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype
    pattern: Pattern
    mvue: Pattern | None = None

    @property
    def multiplications(self) -> int:
        """Of a dense product."""
        return self.rows * self.columns * self.tokens

    def __str__(self) -> str:
        kinds = f" mvue {self.mvue}" if self.mvue else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.columns} to {self.rows}, {self.tokens} tokens, {dtype} {self.pattern}{kinds}"


@dataclass(frozen=True)
class Convolution:
    """A convolution in training, of ``images`` of a micro-batch with (height, width) ``size``."""

    rows: int
    columns: int
    images: int
    size: tuple[int, int]
    window: Window
    pattern: Pattern
    channels_last: bool
    dtype: torch.dtype = torch.float32

    @property
    def multiplications(self) -> int:
        """Of a dense product, edges included."""
        (height, width), (h, w) = self.window.out(*self.size), self.window.taps
        return self.rows * self.columns * h * w * height * width * self.images

    def __str__(self) -> str:
        w, (height, width) = self.window, self.size
        kernel = f"{w.taps[0]}x{w.taps[1]}" + "".join(
            f" {name} {pair[0]}x{pair[1]}"
            for name, pair, usual in (("stride", w.stride, 1), ("dilation", w.dilation, 1))
            if pair != (usual, usual)
        )
        last = ", channels last" if self.channels_last else ""
        return (
            f"{self.columns} to {self.rows} channels, {kernel}, padding {w.padding[0]}x"
            f"{w.padding[1]}, {self.images} images of {height}x{width}{last}, {self.pattern}"
        )


def probe(shape: Shape | Convolution) -> dict[str, Times]:
    """The times of the layer as ``"dense"`` and as ``"packed"``; from the disk if they are known
    there for this processor and this number of threads."""
    machine = _machine()
    if (known := recall(FILE, machine, str(shape), PATHS)) is not None:
        return known
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = measure(shape)
    remember(FILE, machine, str(shape), found)
    return found


def measure(shape: Shape | Convolution) -> dict[str, Times]:
    """The same, always measured: medians of :data:`ROUNDS` rounds in which both take turns."""
    return _of_convolution(shape) if isinstance(shape, Convolution) else _of_linear(shape)


def _of_convolution(shape: Convolution) -> dict[str, Times]:
    generator, window = torch.Generator().manual_seed(1), shape.window
    order = torch.channels_last if shape.channels_last else torch.contiguous_format
    out = (shape.images, shape.rows, *window.out(*shape.size))
    weight, x, dz = (
        torch.randn(*size, generator=generator).contiguous(memory_format=order)
        for size in ((shape.rows, shape.columns, *window.taps),
                     (shape.images, shape.columns, *shape.size), out)
    )  # fmt: skip
    weight = hard_threshold(weight, shape.pattern, 1).contiguous(memory_format=order)
    packed = convolution_cpu.Packed((shape.rows, shape.columns), window, shape.pattern)
    packed.write(weight, None)
    moves = (window.stride, window.padding, window.dilation)
    backward = [getattr(packed, f"backward_{part}") for part in linear_cpu.PARTS]

    def z() -> Tensor:
        return packed(x, weight, None)

    def dx() -> Tensor:
        return convolution_cpu.convolution_back_cpu(dz, weight, backward, shape.size, *moves)

    def dense_z() -> Tensor:
        return functional.conv2d(x, weight, None, *moves)

    def dense_dx() -> Tensor:
        gradients = torch.ops.aten.convolution_backward(
            dz, x, weight, None, *moves, False, [0, 0], 1, [True, False, False]
        )
        return gradients[0]

    if wrong := fault(z, dense_z()) or fault(dx, dense_dx()):
        return {"dense": Times(), "packed": Times(wrong=wrong)}
    calls = ((dense_z, z), (dense_dx, dx), (lambda: None, lambda: packed.write(weight, None)))
    (z_dense, z_packed), (dx_dense, dx_packed), (_, pack) = (_side_by_side(*p) for p in calls)
    return {"dense": Times(0.0, z_dense, dx_dense), "packed": Times(pack, z_packed, dx_packed)}


def _of_linear(shape: Shape) -> dict[str, Times]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((shape.rows, shape.columns), (shape.tokens, shape.columns),
             (shape.tokens, shape.rows), (shape.rows,))  # fmt: skip
    weight, x, dz, bias = (torch.randn(*size, generator=generator) for size in sizes)
    weight = hard_threshold(weight, shape.pattern, 1).contiguous()
    packed = Packed((shape.rows, shape.columns), shape.dtype, shape.pattern)
    packed.write(weight, None)
    forward, backward = (
        [getattr(packed, f"{kind}_{part}") for part in linear_cpu.PARTS]
        for kind in linear_cpu.KINDS
    )
    low, x, dz = (t.to(shape.dtype) for t in (weight, x, dz))
    estimated = dz if shape.mvue is None else estimate(dz, shape.mvue, generator)

    def z() -> Tensor:
        return linear_cpu.linear_cpu(x, weight, bias, forward, backward, "dense")

    def dx() -> Tensor:
        return linear_cpu.multiply_cpu(dz, backward, shape.columns)

    def dw() -> Tensor:
        if shape.mvue is not None:
            groups = -(-shape.tokens // shape.mvue.m) * shape.mvue.n
            return linear_cpu.estimated_cpu(estimated, x, groups)
        return linear_cpu.sampled_cpu(dz, x, forward)

    dense_z = functional.linear(x.float(), weight, bias)
    dense_dw = estimated.float().t() @ x.float()
    if shape.mvue is None:
        dense_dw = dense_dw * (weight != 0)
    wrong = fault(z, dense_z) or fault(dx, dz.float() @ weight) or fault(dw, dense_dw)
    if wrong:
        return {"dense": Times(), "packed": Times(wrong=wrong)}
    calls: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: functional.linear(x, low, bias.to(shape.dtype)), z),
        (lambda: dz @ low, dx),
        (lambda: estimated.t() @ x, dw),
        (lambda: None, lambda: packed.write(weight, None)),
    ]
    (z_dense, z_packed), (dx_dense, dx_packed), (dw_dense, dw_packed), (_, pack) = (
        _side_by_side(*pair) for pair in calls
    )
    return {
        "dense": Times(0.0, z_dense, dx_dense, dw_dense),
        "packed": Times(pack, z_packed, dx_packed, dw_packed),
    }


def _side_by_side(*calls: Callable[[], object]) -> list[float]:
    """The median milliseconds of each call."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for call, times in zip(calls, taken, strict=True):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(times[1:]) for times in taken]  # the first warms up


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        wanted = ("model name\t", "cpu family\t", "model\t\t")
        return " ".join(facts[key].strip() for key in wanted)
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def _machine() -> str:
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
