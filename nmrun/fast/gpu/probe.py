"""Which layers 2:4 products on a GPU can take, which path is right and fast for one: tested and
timed once a shape, and remembered on disk; how a layer gets it.

A path is tested before it is timed: its products must be those of float32 within the rounding of
the dtype, and the same bits in every repetition. What is remembered is by GPU, torch, cuSPARSELt
and the version of this file and of the kernels, in ``probe24.json`` beside the compiled kernels.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.errors import first_line
from nmrun.fast import measurement
from nmrun.fast.gpu import linear, semi_structured
from nmrun.fast.gpu.kernels import compression, cusparselt
from nmrun.fast.gpu.linear import SemiStructuredProducts
from nmrun.fast.gpu.semi_structured import ROUND_UP, padded
from nmrun.fast.measurement import NO_MEMORY, Times, version
from nmrun.patterns import Pattern
from nmrun.products import layer, simulation
from nmrun.products.layer import Phase
from nmrun.sparsity import estimators
from nmrun.sparsity.weight import SparseWeight

FILE = "probe24.json"
PAIRS = Pattern(2, 4)


@dataclass(frozen=True)
class SemiStructuredShape:
    """A linear layer in training: rows = outputs, columns = inputs, tokens of one micro-batch.
    ``both``: the input gradient is sparse too; ``mvue``: so may the weight gradient be; ``fp8``:
    operands of this dtype are rounded to FP8; ``biased``: it has a bias, and the library other
    algorithms."""

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype
    both: bool = False
    mvue: bool = False
    fp8: bool = False
    biased: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        """What is tried."""
        return ("dense", *semi_structured.candidates(self.fp8))

    def __str__(self) -> str:
        kinds = "".join(f" {name}" for name in ("both", "mvue", "fp8") if getattr(self, name))
        kinds += "" if self.biased else " without bias"
        return f"{self.columns} to {self.rows}, {self.tokens} tokens, {str(self.dtype).removeprefix('torch.')}{kinds}"


def measured(shape: SemiStructuredShape, device: torch.device) -> dict[str, Times]:
    """The times of the layer as ``"dense"`` and by every path that may compute it; from the disk if
    they are known there.
    """
    call = partial(measure, shape, device)
    return measurement.measured(shape, FILE, _machine(device), device, call)


def measure(shape: SemiStructuredShape, device: torch.device) -> dict[str, Times]:
    """The same, always measured."""
    generator = torch.Generator(device).manual_seed(1)
    weight = semi_structured.transposable(shape.rows, shape.columns, device).to(shape.dtype)
    sizes = ((shape.tokens, shape.columns), (shape.tokens, shape.rows), (shape.rows,))
    bias: Tensor | None
    x, dz, bias = (
        torch.randn(*size, generator=generator, device=device).to(shape.dtype) for size in sizes
    )
    bias = bias if shape.biased else None
    time = semi_structured.milliseconds

    def weight_gradient() -> Tensor:
        last = simulation.estimate(dz, PAIRS, None) if shape.mvue else dz
        return simulation.backward_product(last.t(), x, shape.fp8)

    dense = Times(
        forward=time(lambda: _forward(x, weight, bias, shape)),
        input_gradient=time(lambda: simulation.backward_product(dz, weight, shape.fp8)),
        weight_gradient=time(weight_gradient),
    )
    by_path = {"dense": dense}
    for name, path in semi_structured.candidates(shape.fp8).items():
        try:
            by_path[name] = _times(path, name, shape, dense, weight, x, dz, bias)
        except torch.OutOfMemoryError:
            by_path[name] = Times(wrong=NO_MEMORY)
        except measurement.ERRORS as error:
            by_path[name] = Times(wrong=first_line(error))
    return by_path


def _times(
    path: semi_structured.Path, name: str, shape: SemiStructuredShape, dense: Times,
    weight: Tensor, x: Tensor, dz: Tensor, bias: Tensor | None,
) -> Times:  # fmt: skip
    other = weight if shape.both else None
    parts, parts_t = path.pack(weight, other)
    expected = _forward(x.float(), weight.float(), None if bias is None else bias.float(), shape)
    named, forward = semi_structured.fastest(name, x, parts, bias, expected)
    algorithms, input_gradient, weight_gradient = (
        [named] * 3,
        dense.input_gradient,
        dense.weight_gradient,
    )
    if shape.both:
        expected = simulation.backward_product(dz.float(), weight.float(), shape.fp8)
        algorithms[1], input_gradient = semi_structured.fastest(name, dz, parts_t, None, expected)
    if shape.mvue:
        try:
            algorithms[2], weight_gradient = _weight_gradient(name, x, dz)
        except torch.OutOfMemoryError:
            raise
        except measurement.ERRORS as error:
            weight_gradient = float("inf")  # then it stays dense
            why = first_line(error)
            logging.getLogger("nmrun").info(f"no 2:4 weight gradient by {name}, {shape}: {why}")
    whole = weight.float()
    packed = SemiStructuredProducts(name, whole, None, shape.dtype, shape.both)
    return Times(
        semi_structured.milliseconds(lambda: packed.write(whole, None)),
        forward,
        input_gradient,
        weight_gradient,
        algorithms=algorithms if algorithms != [name] * 3 else (),
        library=library(x.device),
    )


def _weight_gradient(name: str, x: Tensor, dz: Tensor) -> tuple[str, float]:
    """The product ``E^T x`` by the fastest right algorithm, with the estimate E and its packing."""
    filled = padded(x, 2 * ROUND_UP).t()
    # all that is not zero is certain, so the estimate is known
    certain = (
        dz * torch.tensor([1, 1, 0, 0], device=x.device).repeat(len(dz) // 4 + 1)[: len(dz), None]
    )
    parts = semi_structured.named(name).pack_estimate(padded(certain, 2 * ROUND_UP), PAIRS)
    expected = x.t().float() @ certain.float()
    named, _ = semi_structured.fastest(name, filled, parts, None, expected)
    return named, semi_structured.milliseconds(
        lambda: linear.weight_gradient24(x, dz, str(PAIRS), named)
    )


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, shape: SemiStructuredShape) -> Tensor:
    return (
        simulation.linear(x, weight, bias, fp8=True)
        if shape.fp8
        else functional.linear(x, weight, bias)
    )


def library(device: torch.device) -> str:
    """The GPU and the version of cuSPARSELt, by which the library's algorithms have their numbers."""
    loaded = cusparselt.loaded_cusparselt()
    number = ".".join(map(str, loaded[0])) if loaded else "none"
    return f"{torch.cuda.get_device_name(device)}, cuSPARSELt {number}"


def _machine(device: torch.device) -> str:
    modules = semi_structured, linear, simulation, estimators, compression, cusparselt
    files = [Path(file) for file in (__file__, *(str(module.__file__) for module in modules))]
    packages = map(resources.files, ("nmrun.kernels", "nmrun.fast.gpu.kernels"))
    sources = (file for package in packages for file in package.iterdir())
    kernels = sorted((s for s in sources if s.name.startswith("triton_")), key=lambda s: s.name)
    return f"{library(device)}, torch {torch.__version__}, probe {version([*files, *kernels])}"


# of rows and columns, without FP8 and with it; paths that want more say so when tried
MULTIPLE = {
    False: 16,
    True: 32,
}


def obstacle(device: torch.device) -> str:
    """Why there are no 2:4 products on this device; empty if there might be."""
    if device.type != "cuda":
        return "no CUDA device"
    if torch.version.hip:
        return "cuSPARSELt is for NVIDIA's GPUs, and this torch is for ROCm"
    capable = torch.cuda.get_device_capability(device)[0] >= 8
    return "" if capable else "this GPU has no sparse tensor cores"


def eligible(
    weight: SparseWeight, recipe: Phase, largest_input: tuple[torch.Size, torch.dtype] | None
) -> tuple[str, SemiStructuredShape | None]:
    """The reason why a layer cannot be accelerated, or the shape that can be tried."""
    if weight.is_sharded:
        return "its weight is sharded (FSDP)", None
    if weight.layer is not None and weight.layer.input_mvue is not None:
        return layer.ESTIMATED_INPUT, None
    if weight.parameter.dim() != 2:
        return "torch has no sparse convolution", None
    if not weight.pattern.fits_2_4:
        return f"{weight.pattern} weights do not fit into 2:4", None
    if largest_input is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    tokens, dtype = largest_input[0].numel() // max(1, largest_input[0][-1]), largest_input[1]
    mvue, fp8 = (None, False) if weight.layer is None else (weight.layer.mvue, weight.layer.fp8)
    rows, columns = weight.shape if weight.dim == 1 else reversed(weight.shape)
    if dtype not in measurement.ALLOWED:
        return (
            f"{str(dtype).removeprefix('torch.')}: 2:4 products are of bfloat16 or float16 (trainer.precision)",
            None,
        )
    if rows % MULTIPLE[fp8] or columns % MULTIPLE[fp8]:
        return f"{columns} inputs and {rows} outputs are not multiples of {MULTIPLE[fp8]}", None
    estimated = mvue is not None and mvue.fits_2_4 and not fp8
    return "", SemiStructuredShape(
        *(rows, columns, tokens, dtype, _sparse_input_gradient(weight, recipe), estimated, fp8),
        biased=getattr(weight.module, "bias", None) is not None,
    )


def _sparse_input_gradient(weight: SparseWeight, recipe: Phase) -> bool:
    """Whether the weight of the input gradient is N:M along the outputs in their order.

    Bi-Mask's is in another order.
    """
    pruned_again = weight.layer is not None and weight.layer.prune_again in weight.dependents
    return recipe.transposable or pruned_again


def packed(
    sparse_layer: layer.Layer, path: str, times: dict[str, Times], shape: SemiStructuredShape
) -> SemiStructuredProducts:
    """What the products of a layer read by a path."""
    weight = sparse_layer.weight
    matrix = sparse_layer.matrix(weight.weight)
    other = sparse_layer.matrix(sparse_layer.input_weight)
    weight_path = min(
        (name for name, t in times.items() if not t.wrong),
        key=lambda name: times[name].weight_gradient,
    )
    forward, input_gradient, _ = _algorithms(path, times)
    return SemiStructuredProducts(
        *(forward, matrix, other, shape.dtype, shape.both),
        None if weight_path == "dense" else _algorithms(weight_path, times)[2],
        input_gradient,
    )


def _algorithms(path: str, times: dict[str, Times]) -> tuple[str, str, str]:
    """The names of a path for the three products."""
    forward, input_gradient, weight_gradient = times[path].algorithms or (path,) * 3
    return forward, input_gradient, weight_gradient
