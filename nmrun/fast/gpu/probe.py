"""Which layers 2:4 products on a GPU can take, which path is right and fast for one: tested and
timed once a shape, and remembered on disk; how a layer gets it.

A path is tested before it is timed: its products must be those of float32 within the rounding of
the dtype, and the same bits in every repetition. What is remembered is by GPU, torch, cuSPARSELt
and the version of this file and of the kernels, in ``probe24.json`` beside the compiled kernels.
"""

from __future__ import annotations

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
from nmrun.fast.gpu.kernels import cusparselt
from nmrun.fast.gpu.linear import SemiStructuredProducts
from nmrun.fast.measurement import NO_MEMORY, Times, version
from nmrun.products import layer
from nmrun.products.layer import Phase
from nmrun.sparsity.weight import SparseWeight

FILE = "probe24.json"
MULTIPLE = 16  # of rows and columns; paths that want more say so when tried


@dataclass(frozen=True)
class SemiStructuredShape:
    """A linear layer in training: rows = outputs, columns = inputs, tokens of one micro-batch.
    ``both``: the input gradient is sparse too; ``biased``: it has a bias, and the library other
    algorithms."""

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype
    both: bool = False
    biased: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        """What is tried."""
        return ("dense", *semi_structured.PATHS)

    def __str__(self) -> str:
        kinds = (" both" if self.both else "") + ("" if self.biased else " without bias")
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
    time, whole = semi_structured.milliseconds, weight.float()
    dense = Times(
        forward=time(lambda: functional.linear(x, weight, bias)),
        input_gradient=time(lambda: dz @ weight),
    )
    exact = functional.linear(x.float(), whole, None if bias is None else bias.float())

    def of(name: str) -> Times:
        pack, fastest = semi_structured.PATHS[name].pack, semi_structured.fastest
        forward, forward_time = fastest(name, x, pack(weight), bias, exact)
        backward, backward_time = forward, dense.input_gradient
        if shape.both:
            exact_dx = dz.float() @ whole
            backward, backward_time = fastest(name, dz, pack(weight.t()), None, exact_dx)
        products = SemiStructuredProducts(name, whole, None, shape.dtype, shape.both)
        return Times(
            time(lambda: products.write(whole, None)),
            forward_time,
            backward_time,
            algorithms=(forward, backward) if {forward, backward} != {name} else (),
            library=library(device),
        )

    by_path = {"dense": dense}
    for name in semi_structured.PATHS:
        try:
            by_path[name] = of(name)
        except torch.OutOfMemoryError:
            by_path[name] = Times(wrong=NO_MEMORY)
        except measurement.ERRORS as error:
            by_path[name] = Times(wrong=first_line(error))
    return by_path


def library(device: torch.device) -> str:
    """The GPU and the version of cuSPARSELt, by which the library's algorithms have their numbers."""
    loaded = cusparselt.loaded_cusparselt()
    number = ".".join(map(str, loaded[0])) if loaded else "none"
    return f"{torch.cuda.get_device_name(device)}, cuSPARSELt {number}"


def _machine(device: torch.device) -> str:
    modules = measurement, semi_structured, linear, cusparselt
    files = [Path(file) for file in (__file__, *(str(module.__file__) for module in modules))]
    packages = map(resources.files, ("nmrun.kernels", "nmrun.fast.gpu.kernels"))
    sources = (file for package in packages for file in package.iterdir())
    kernels = sorted((s for s in sources if s.name.startswith("triton_")), key=lambda s: s.name)
    return f"{library(device)}, torch {torch.__version__}, probe {version([*files, *kernels])}"


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
    if why := layer.unpackable(weight):
        return why, None
    if weight.parameter.dim() != 2:
        return "torch has no sparse convolution", None
    if not weight.pattern.fits_2_4:
        return f"{weight.pattern} weights do not fit into 2:4", None
    if largest_input is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    tokens, dtype = largest_input[0].numel() // max(1, largest_input[0][-1]), largest_input[1]
    rows, columns = weight.shape if weight.dim == 1 else reversed(weight.shape)
    if dtype not in measurement.ALLOWED:
        return (
            f"{str(dtype).removeprefix('torch.')}: 2:4 products are of bfloat16 or float16 (trainer.precision)",
            None,
        )
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"{columns} inputs and {rows} outputs are not multiples of {MULTIPLE}", None
    both, biased = _sparse_input_gradient(weight, recipe), weight.module.bias is not None
    return "", SemiStructuredShape(rows, columns, tokens, dtype, both, biased)


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
    matrix = sparse_layer.matrix(sparse_layer.weight.weight)
    other = sparse_layer.matrix(sparse_layer.input_weight)
    forward, input_gradient, *_ = times[path].algorithms or (path, path)
    return SemiStructuredProducts(forward, matrix, other, shape.dtype, shape.both, input_gradient)
