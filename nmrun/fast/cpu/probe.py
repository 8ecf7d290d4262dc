"""Which layers N:M products on the CPU can take, and which dense layers oneDNN; whether these are
right and faster: tested and timed once a shape, and remembered on disk; how a layer gets them.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    call = functools.partial(by or measure, shape)
    return measurement.measured(shape, FILE, _machine(), device, call)


def measure(shape: LinearShape | ConvolutionShape | AttentionShape) -> dict[str, Times]:
    """The same, always measured: the fastest of :data:`ROUNDS` rounds in which all take turns."""
    if isinstance(shape, AttentionShape):
        return _of_attention(shape)
    return _of_convolution(shape) if isinstance(shape, ConvolutionShape) else _of_linear(shape)


def _of_convolution(shape: ConvolutionShape) -> dict[str, Times]:
    generator, window = torch.Generator().manual_seed(1), shape.window
    order = torch.channels_last if shape.channels_last else torch.contiguous_format
    out = (shape.images, shape.rows, *window.out(*shape.size))
    weight, x, dz = (
        torch.randn(*size, generator=generator).contiguous(memory_format=order)
        for size in ((shape.rows, shape.columns, *window.taps),
                     (shape.images, shape.columns, *shape.size), out)
    )  # fmt: skip
    weight = hard_threshold(weight, shape.pattern, 1).contiguous(memory_format=order)
    kind = CONVOLUTION[shape.packed]
    packed = kind((shape.rows, shape.columns), window)
    packed.write(weight, None)
    moves, backward = window.moves, packed.parts("backward")
    x, dz, low = (t.to(shape.dtype) for t in (x, dz, weight))

    def z() -> Tensor:
        return packed(x, weight, None)

    def dx() -> Tensor:
        return convolution.convolution_back(dz, weight, backward, shape.size, window.numbers)

    def dense_z() -> Tensor:
        return functional.conv2d(x, low, None, *moves)

    def dense_dx() -> Tensor:
        gradient: Tensor = torch.ops.aten.convolution_backward(
            dz, x, low, None, *moves, False, [0, 0], 1, [True, False, False]
        )[0]
        return gradient

    rounded = low.float()
    exact_z = functional.conv2d(x.float(), rounded, None, *moves)
    exact_dx = conv2d_input(x.shape, rounded, dz.float(), *moves)
    _, pack = side_by_side(lambda: None, lambda: packed.write(weight, None))
    calls = {"dense": (dense_z, dense_dx), shape.packed: (z, dx)}
    wrong = {shape.packed: first_fault((z, dx), (exact_z, exact_dx))}
    return timed(calls, wrong, {shape.packed: pack})  # the weight gradient is dense by either path


def _of_linear(shape: LinearShape) -> dict[str, Times]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((shape.rows, shape.columns), (shape.tokens, shape.columns),
             (shape.tokens, shape.rows), (shape.rows,))  # fmt: skip
    weight, x, dz, bias = (torch.randn(*size, generator=generator) for size in sizes)
    if shape.pattern is not None:
        weight = hard_threshold(weight, shape.pattern, 1).contiguous()
    low, x, dz, low_bias = (t.to(shape.dtype) for t in (weight, x, dz, bias))
    # forward product, input gradient and weight gradient by each path
    calls: dict[str, tuple[Callable[[], Tensor], ...]] = {
        "dense": (
            lambda: functional.linear(x, weight.to(shape.dtype), low_bias),  # as autocast does
            lambda: dz @ low,
            lambda: dz.t() @ x,
        )
    }
    whole = dz.float().t() @ x.float()

    def exact(used: Tensor, gradient: Tensor) -> list[Tensor]:
        used = used.float()
        return [functional.linear(x.float(), used, bias), dz.float() @ used, gradient]

    expected, pack = {"dense": exact(weight, whole)}, dict[str, float]()
    if ONEDNN in shape.paths:
        expected[ONEDNN] = expected["dense"]
        calls[ONEDNN] = (
            lambda: onednn.product(x, weight, bias),
            lambda: onednn.product(dz, weight.t()),
            lambda: onednn.product(dz.t(), x.t()),
        )
    if shape.pattern is not None:
        for name in shape.paths:
            if name in LINEAR:
                packed = LINEAR[name]((shape.rows, shape.columns), shape.dtype, shape.pattern)
                packed.write(weight, None)
                calls[name] = _packed(packed, weight, x, dz, bias)
                # a product is right within the rounding of its own result, so of what it rounds first
                kept = weight != 0
                if isinstance(packed, BlockProducts):
                    columns = blocks.kept_columns(kept, packed.height)
                    kept = columns.repeat_interleave(packed.height, 0)
                expected[name] = exact(low if name in LOW else weight, whole * kept)
                _, pack[name] = side_by_side(
                    lambda: None, functools.partial(packed.write, weight, None)
                )
    wrong = {name: first_fault(calls[name], expected[name]) for name in calls if name != "dense"}
    return timed(calls, wrong, pack)


def _of_attention(shape: AttentionShape) -> dict[str, Times]:
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch, shape.tokens, shape.heads, shape.width)
    *operands, dz = (
        torch.randn(*size, generator=generator).bfloat16().transpose(1, 2) for _ in range(4)
    )
    leaves = [operand.detach().requires_grad_() for operand in operands]
    calls: dict[str, tuple[Callable[[], object], ...]] = {}
    for path in shape.paths:
        attention = DotProductAttention(shape.causal)
        attention.in_float32 = path == FLOAT32
        with torch.enable_grad():
            z = attention(*leaves)
        gradients = functools.partial(torch.autograd.grad, z, leaves, dz, retain_graph=True)
        calls[path] = functools.partial(attention, *operands), gradients
    return timed(calls)


def first_fault(products: Iterable[Callable[[], Tensor]], expected: Iterable[Tensor]) -> str:
    """What is wrong with the first product that is; empty if none is."""
    return next(filter(None, map(fault, products, expected)), "")


def timed(
    calls: Mapping[str, Sequence[Callable[[], object]]],
    wrong: Mapping[str, str] = MappingProxyType({}),
    pack: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Times]:
    """The times of each path's products, in which the paths take turns.

    Args:
        calls: forward product and gradients by path.
        wrong: what is wrong with a path; such a one is not timed.
        pack: the milliseconds that packing takes by path.
    """
    by_path = {name: Times(wrong=message) for name, message in wrong.items() if message}
    right = [name for name in calls if name not in by_path]
    durations = [side_by_side(*each) for each in zip(*(calls[n] for n in right), strict=True)]
    for name, *times in zip(right, *durations, strict=True):
        by_path[name] = Times(pack.get(name, 0.0), *times)
    return by_path


def _packed(
    packed: LinearProducts, weight: Tensor, x: Tensor, dz: Tensor, bias: Tensor
) -> tuple[Callable[[], Tensor], ...]:
    forward, backward = map(packed.parts, PRODUCTS)
    return (
        lambda: linear.linear(x, weight, bias, forward, backward, linear.DENSE),
        lambda: linear.multiply(dz, backward, x.shape[1]),
        lambda: linear.sampled(dz, x, forward),
    )


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
    if largest_input is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    if why := layer.simulated(weight):
        return why, None
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
        tokens = inputs.numel() // max(1, inputs[-1])
        pattern = weight.pattern if blocks.height_in(weight.pattern) else weight.pattern.by_rows
        shape = LinearShape(rows, columns, tokens, dtype, pattern, mvue)
    if shape.multiplications < SMALLEST:
        return f"its products are too small to gain ({shape})", None
    return "", shape


def dense(
    module: nn.Module, largest_input: tuple[torch.Size, torch.dtype] | None
) -> LinearShape | None:
    """The shape that can be tried by oneDNN, of a module that has no sparse weight; None where it
    cannot."""
    weight = onednn.weight_of(module)
    if largest_input is None or weight is None or not onednn.available():
        return None
    inputs, dtype = largest_input
    if not dtype == weight.dtype == torch.float32:
        return None
    rows, columns = weight.shape
    shape = LinearShape(rows, columns, inputs.numel() // max(1, inputs[-1]), dtype, None)
    return shape if shape.multiplications >= SMALLEST else None


def attention(
    module: DotProductAttention, largest_input: tuple[torch.Size, torch.dtype] | None
) -> AttentionShape | None:
    """The shape that can be tried in float32; None where it cannot."""
    size, dtype = largest_input or ((), None)
    if dtype != torch.bfloat16 or len(size) != 4:
        return None
    shape = AttentionShape(*size, causal=module.causal)
    return shape if shape.multiplications >= SMALLEST else None


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
