"""Which layers N:M products on the CPU can take, and which dense layers oneDNN; whether these are
right and faster: tested and timed once a shape, and remembered on disk; how a layer gets them.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input

from nmrun.fast import measurement
from nmrun.fast.cpu import convolution, linear, onednn
from nmrun.fast.cpu.convolution import Bf16ConvolutionProducts, ConvolutionProducts
from nmrun.fast.cpu.kernels import bf16, blocks, products
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.cpu.linear import (
    PRODUCTS,
    Bf16Forward,
    Bf16Products,
    BlockProducts,
    LinearProducts,
)
from nmrun.fast.measurement import (
    BF16,
    BF16_BLOCKS,
    BF16_FORWARD,
    FLOAT32,
    ONEDNN,
    Times,
    fault,
    version,
)
from nmrun.kernels.compiler import cpuinfo
from nmrun.patterns import Pattern
from nmrun.products import layer
from nmrun.products.attention import DotProductAttention
from nmrun.products.layer import Phase
from nmrun.sparsity.masks import hard_threshold
from nmrun.sparsity.weight import SparseWeight

CPU, FILE = torch.device("cpu"), "probe_cpu.json"
# by their path
LOW = {BF16: Bf16Products, BF16_FORWARD: Bf16Forward, BF16_BLOCKS: BlockProducts}
LINEAR = {"packed": LinearProducts, **LOW}
CONVOLUTION = {"packed": ConvolutionProducts, BF16: Bf16ConvolutionProducts}
# multiplications of one product below which a layer is left alone: some 0.2 ms, where what
# Python does around an operator eats the gain
SMALLEST = 1 << 24
ROUNDS = 9
Call = Callable[[], Any]
Calls = dict[str, tuple[Call, ...]]  # by path
Checks = Iterable[tuple[Call, Tensor]]  # products, and what they should be
ENOUGH = 1.0  # seconds of one product's rounds after which three are enough


@dataclass(frozen=True)
class LinearShape:
    """A linear layer in training: rows = outputs, columns = inputs, tokens of one micro-batch.

    ``pattern``: None for a layer that is always dense. ``mvue``: the weight gradient is of an
    estimate, which oneDNN does not compute.
    """

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype
    pattern: Pattern | None
    mvue: bool = False

    @property
    def multiplications(self) -> int:
        """Of a dense product."""
        return self.rows * self.columns * self.tokens

    @property
    def paths(self) -> tuple[str, ...]:
        """What is tried."""
        paths = ["dense"]
        if self.dtype == torch.float32 and not self.mvue and onednn.available():
            paths.append(ONEDNN)
        if self.pattern:
            paths.append("packed")
            if self.dtype == torch.bfloat16 and not bf16.KERNELS.obstacle():
                paths += LOW if blocks.height_in(self.pattern) else (BF16, BF16_FORWARD)
        return tuple(paths)

    def __str__(self) -> str:
        kinds = (f" {self.pattern}" if self.pattern else "") + (" mvue" if self.mvue else "")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.columns} to {self.rows}, {self.tokens} tokens, {dtype}{kinds}"


@dataclass(frozen=True)
class AttentionShape:
    """Attention in bfloat16: queries, keys and values (batch, heads, tokens, width)."""

    batch: int
    heads: int
    tokens: int
    width: int
    causal: bool
    paths: ClassVar[tuple[str, ...]] = ("dense", FLOAT32)

    @property
    def multiplications(self) -> int:
        """Of all queries and keys."""
        return self.batch * self.heads * self.tokens**2 * self.width

    def __str__(self) -> str:
        causal = "causal " if self.causal else ""
        return (
            f"{causal}attention in {self.heads} heads of {self.width}, "
            f"{self.batch} x {self.tokens} tokens, bfloat16"
        )


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution in training, of ``images`` of a micro-batch with (height, width) ``size``."""

    rows: int
    columns: int
    images: int
    size: tuple[int, int]
    window: Window
    pattern: Pattern
    channels_last: bool
    dtype: torch.dtype

    @property
    def paths(self) -> tuple[str, ...]:
        """What is tried."""
        return "dense", self.packed

    @property
    def packed(self) -> str:
        """The path of packed products."""
        return "packed" if self.dtype == torch.float32 else BF16

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
        low = "" if self.dtype == torch.float32 else ", bfloat16"
        return (
            f"{self.columns} to {self.rows} channels, {kernel}, padding {w.padding[0]}x"
            f"{w.padding[1]}, {self.images} images of {height}x{width}{last}{low}, {self.pattern}"
        )


def measured(
    shape: Any,
    device: torch.device = CPU,
    by: Callable[[Any], dict[str, Times]] | None = None,
) -> dict[str, Times]:
    """The times of the layer by every path that is tried; from the disk if they are known there for
    this processor and this number of threads. ``by``: what measures, default :func:`measure`."""
    return measurement.measured(shape, FILE, _machine(), device, partial(by or measure, shape))


def measure(shape: LinearShape | ConvolutionShape | AttentionShape) -> dict[str, Times]:
    """The same, always measured: the fastest of :data:`ROUNDS` rounds in which all take turns."""
    if isinstance(shape, AttentionShape):
        return _of_attention(shape)
    return _of_convolution(shape) if isinstance(shape, ConvolutionShape) else _of_linear(shape)


def normal(*sizes: Sequence[int]) -> list[Tensor]:
    """Normal numbers, the same for the same sizes."""
    generator = torch.Generator().manual_seed(1)
    how: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    return [torch.randn(*size, **how) for size in sizes]


def _of_convolution(shape: ConvolutionShape) -> dict[str, Times]:
    window, moves = shape.window, shape.window.moves
    order = torch.channels_last if shape.channels_last else torch.contiguous_format
    images, out = (shape.images, shape.columns, *shape.size), window.out(*shape.size)
    sizes = (shape.rows, shape.columns, *window.taps), images, (shape.images, shape.rows, *out)
    weight, x, dz = (t.contiguous(memory_format=order) for t in normal(*sizes))
    weight = hard_threshold(weight, shape.pattern, 1).contiguous(memory_format=order)
    packed = CONVOLUTION[shape.packed]((shape.rows, shape.columns), window)
    write = partial(packed.write, weight, None)
    write()
    x, dz, low = (t.to(shape.dtype) for t in (x, dz, weight))
    how = (*moves, False, [0, 0], 1, [True, False, False])
    back = dz, weight, packed.parts("backward"), shape.size, window.numbers
    calls: Calls = {
        "dense": (
            partial(functional.conv2d, x, low, None, *moves),
            lambda: torch.ops.aten.convolution_backward(dz, x, low, None, *how)[0],
        ),
        shape.packed: (
            partial(packed, x, weight, None),
            partial(convolution.convolution_back, *back),
        ),
    }
    rounded = low.float()
    exact = (
        functional.conv2d(x.float(), rounded, None, *moves),
        conv2d_input(x.shape, rounded, dz.float(), *moves),
    )
    checks = {shape.packed: zip(calls[shape.packed], exact, strict=True)}
    return tried(
        calls, checks, {shape.packed: write}
    )  # the weight gradient is dense by either path


def _of_linear(shape: LinearShape) -> dict[str, Times]:
    sides = shape.rows, shape.columns
    inputs, outputs = (shape.tokens, shape.columns), (shape.tokens, shape.rows)
    weight, x, dz, bias = normal(sides, inputs, outputs, (shape.rows,))
    if shape.pattern is not None:
        weight = hard_threshold(weight, shape.pattern, 1).contiguous()
    low, x, dz, low_bias = (t.to(shape.dtype) for t in (weight, x, dz, bias))
    # forward product, input gradient and weight gradient by each path
    calls: Calls = {
        "dense": (
            lambda: functional.linear(x, weight.to(shape.dtype), low_bias),  # as autocast does
            lambda: dz @ low,
            lambda: dz.t() @ x,
        )
    }
    whole, checks, pack = dz.float().t() @ x.float(), dict[str, Checks](), dict[str, Call]()

    def check(name: str, used: Tensor, gradient: Tensor) -> None:
        used = used.float()
        exact = functional.linear(x.float(), used, bias), dz.float() @ used, gradient
        checks[name] = zip(calls[name], exact, strict=True)

    if ONEDNN in shape.paths:
        calls[ONEDNN] = (
            lambda: onednn.product(x, weight, bias),
            lambda: onednn.product(dz, weight.t()),
            lambda: onednn.product(dz.t(), x.t()),
        )
        check(ONEDNN, weight, whole)
    for name in (path for path in shape.paths if path in LINEAR):
        assert shape.pattern is not None
        packed = LINEAR[name](sides, shape.dtype, shape.pattern)
        pack[name] = partial(packed.write, weight, None)
        pack[name]()
        forward, backward = map(packed.parts, PRODUCTS)
        calls[name] = (
            partial(linear.linear, x, weight, bias, forward, backward, linear.DENSE),
            partial(linear.multiply, dz, backward, shape.columns),
            partial(linear.sampled, dz, x, forward),
        )
        # a product is right within the rounding of its own result, so of what it rounds first
        kept = weight != 0
        if isinstance(packed, BlockProducts):
            kept = blocks.kept_columns(kept, packed.height).repeat_interleave(packed.height, 0)
        check(name, low if name in LOW else weight, whole * kept)
    return tried(calls, checks, pack)


def _of_attention(shape: AttentionShape) -> dict[str, Times]:
    size = (shape.batch, shape.tokens, shape.heads, shape.width)
    *operands, dz = (t.bfloat16().transpose(1, 2) for t in normal(*[size] * 4))
    leaves = [operand.detach().requires_grad_() for operand in operands]
    calls: Calls = {}
    for path in shape.paths:
        attention = DotProductAttention(shape.causal)
        attention.in_float32 = path == FLOAT32
        with torch.enable_grad():
            z = attention(*leaves)
        gradients = partial(torch.autograd.grad, z, leaves, dz, retain_graph=True)
        calls[path] = partial(attention, *operands), gradients
    return tried(calls)


def tried(
    calls: Calls,
    checks: Mapping[str, Checks] = MappingProxyType({}),
    pack: Mapping[str, Call] = MappingProxyType({}),
) -> dict[str, Times]:
    """The times of each path's products, in which the paths take turns; of one that is wrong, why.

    Args:
        calls: forward product and gradients by path.
        checks: products of a path with what they should be.
        pack: what packs the weight of a path.
    """
    by_path = dict[str, Times]()
    for name, pairs in checks.items():
        if wrong := next(filter(None, (fault(call, exact) for call, exact in pairs)), ""):
            by_path[name] = Times(wrong=wrong)
    right = [name for name in calls if name not in by_path]
    durations = [side_by_side(*each) for each in zip(*(calls[n] for n in right), strict=True)]
    for name, *times in zip(right, *durations, strict=True):
        packing = side_by_side(lambda: None, pack[name])[1] if name in pack else 0.0
        by_path[name] = Times(packing, *times)
    return by_path


def side_by_side(*calls: Callable[[], object]) -> list[float]:
    """The milliseconds of each call in the fastest of :data:`ROUNDS` rounds, in which all take turns.

    With one thread it is that thread's CPU time, which other work hardly disturbs; else it is that of the
    wall. The fastest is disturbed least: where other processes take half of each core, the ratio of two
    such times is up to a fifth off, that of the medians up to a third.
    """
    durations: list[list[float]] = [[] for _ in calls]
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = time.perf_counter()
    for count in range(ROUNDS + 1):
        if count > 3 and time.perf_counter() - began > ENOUGH:
            break
        for call, times in zip(calls, durations, strict=True):
            begin = now()
            call()
            times.append(1e3 * (now() - begin))
    return [min(times[1:]) for times in durations]  # the first warms up


def _processor() -> str:
    facts, keys = cpuinfo(), ("model name", "cpu family", "model")
    if all(key in facts for key in keys):
        return " ".join(facts[key] for key in keys)
    return platform.processor() or platform.machine()


@functools.cache
def _version() -> str:
    packages = (resources.files(package) for package in ("nmrun.kernels", "nmrun.fast.cpu.kernels"))
    kernels = [f for package in packages for f in package.iterdir() if f.name.endswith(".c")]
    here = [__file__, str(measurement.__file__), str(Path(__file__).with_name("activations.py"))]
    return version([*sorted(kernels, key=lambda file: file.name), *map(Path, here)])


def _machine() -> str:
    threads = f"{torch.get_num_threads()} threads"
    return f"{_processor()}, {threads}, torch {torch.__version__}, kernels {_version()}"


def obstacle(device: torch.device) -> str:
    """Why there are no N:M products on this CPU; empty if there might be."""
    return products.KERNELS.obstacle()


def eligible(
    weight: SparseWeight, recipe: Phase, largest_input: tuple[torch.Size, torch.dtype] | None
) -> tuple[str, LinearShape | ConvolutionShape | None]:
    """The reason why a layer cannot be accelerated, or the shape that can be tried."""
    if weight.is_sharded and weight.layer is not None and weight.layer.input_weight is not None:
        return "the weight of its input gradient is sharded (FSDP)", None
    if why := layer.unpackable(weight):
        return why, None
    if largest_input is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    inputs, dtype = largest_input
    if dtype not in products.DTYPES or weight.parameter.dtype != torch.float32:
        return f"{str(dtype).removeprefix('torch.')}: packed weights are float32", None
    shape: LinearShape | ConvolutionShape
    if weight.parameter.dim() > 2:
        try:
            shape = _convolution(weight, inputs, dtype)
        except ValueError as error:
            return str(error), None
    else:
        mvue = weight.layer is not None and weight.layer.mvue is not None
        rows, columns = weight.shape if weight.dim == 1 else reversed(weight.shape)
        pattern = weight.pattern if blocks.height_in(weight.pattern) else weight.pattern.by_rows
        shape = LinearShape(rows, columns, tokens_of(inputs), dtype, pattern, mvue)
    if shape.multiplications < SMALLEST:
        return f"its products are too small to gain ({shape})", None
    return "", shape


def otherwise(
    module: nn.Module, largest_input: tuple[torch.Size, torch.dtype] | None
) -> LinearShape | AttentionShape | None:
    """The shape that can be tried of a module that has no sparse weight: a linear layer by oneDNN,
    attention in float32; None where it cannot."""
    shape: LinearShape | AttentionShape
    size, dtype = largest_input or ((), None)
    if isinstance(module, DotProductAttention):
        if dtype != torch.bfloat16 or len(size) != 4:
            return None
        shape = AttentionShape(*size, causal=module.causal)
    else:
        weight = onednn.weight_of(module)
        if weight is None or not dtype == weight.dtype == torch.float32 or not onednn.available():
            return None
        shape = LinearShape(len(weight), weight.shape[1], tokens_of(size), torch.float32, None)
    return shape if shape.multiplications >= SMALLEST else None


def tokens_of(size: Sequence[int]) -> int:
    """Of an input of this size."""
    return math.prod(size) // max(1, size[-1])


def _convolution(weight: SparseWeight, inputs: torch.Size, dtype: torch.dtype) -> ConvolutionShape:
    """Raises ValueError: why it cannot be packed."""
    if dtype == torch.bfloat16 and (why := bf16.KERNELS.obstacle()):
        raise ValueError(f"bfloat16: {why}")
    if not isinstance(weight.module, nn.Conv2d) or len(inputs) != 4:
        raise ValueError("of convolutions those of batches of images are packed")
    window, (rows, columns, *_) = convolution.window_of(weight.module), weight.shape
    last = weight.parameter.is_contiguous(memory_format=torch.channels_last)
    size, pattern = (inputs[2], inputs[3]), weight.pattern.by_rows
    return ConvolutionShape(rows, columns, inputs[0], size, window, pattern, last, dtype)


def packed(
    sparse_layer: layer.Layer,
    path: str,
    times: dict[str, Times],
    shape: LinearShape | ConvolutionShape,
) -> LinearProducts | ConvolutionProducts:
    """What the products of a layer read by a path."""
    sides = (shape.rows, shape.columns)
    if isinstance(shape, ConvolutionShape):
        return CONVOLUTION[path](sides, shape.window)
    dense = onednn.best_gradient(times)
    faster = bool(times[path].weight_gradient < times[dense].weight_gradient)
    assert shape.pattern is not None  # of a sparse layer
    kind = LINEAR[path]
    return kind(sides, shape.dtype, shape.pattern, faster, dense)
