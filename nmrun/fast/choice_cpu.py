"""Which layers N:M products on the CPU can take, how a layer gets them, and which dense layers
oneDNN can take.
"""

from __future__ import annotations

import torch
from torch import nn

from nmrun.fast import convolution_cpu, dense_cpu, probe_cpu
from nmrun.fast.kernels import cpu_products
from nmrun.fast.linear_cpu import Packed
from nmrun.fast.probe_cpu import Convolution, Shape
from nmrun.fast.times import Times
from nmrun.products import layer
from nmrun.products.layer import Phase
from nmrun.sparsity.weight import SparseWeight


def obstacle(device: torch.device) -> str:
    """Why there are no N:M products on this CPU; empty if there might be."""
    return "" if cpu_products.available() else "no C compiler works here, which the CPU's need"


def eligible(
    weight: SparseWeight, recipe: Phase, seen: tuple[torch.Size, torch.dtype] | None
) -> tuple[str, Shape | Convolution | None]:
    """The reason why a layer cannot be accelerated, or the shape that can be tried."""
    if weight.is_sharded and weight.layer is not None and weight.layer.input_weight is not None:
        return "the weight of its input gradient is sharded (FSDP)", None
    if seen is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    if weight.layer is not None and weight.layer.input_mvue is not None:
        return layer.ESTIMATED_INPUT, None
    if weight.layer is not None and weight.layer.fp8:
        return "FP8 is simulated, in dense products", None
    convolution, (inputs, dtype) = weight.parameter.dim() > 2, seen
    if dtype not in probe_cpu.DTYPES[: 1 if convolution else 2] or not _is_float32(weight):
        return f"{str(dtype).removeprefix('torch.')}: packed weights are float32", None
    shape: Shape | Convolution
    if convolution:
        try:
            shape = _convolution(weight, inputs)
        except ValueError as error:
            return str(error), None
    else:
        mvue = None if weight.layer is None else weight.layer.mvue
        rows, columns = weight.shape if weight.dim == 1 else reversed(weight.shape)
        tokens = inputs.numel() // max(1, inputs[-1])
        shape = Shape(rows, columns, tokens, dtype, weight.pattern.by_rows, mvue)
    if shape.multiplications < probe_cpu.SMALLEST:
        return f"its products are too small to gain ({shape})", None
    return "", shape


def dense(module: nn.Module, seen: tuple[torch.Size, torch.dtype]) -> Shape | None:
    """The shape that can be tried by oneDNN, of a module that has no sparse weight; None where it
    cannot."""
    weight, (inputs, dtype) = dense_cpu.weight_of(module), seen
    if weight is None or not dtype == weight.dtype == torch.float32 or not dense_cpu.available():
        return None
    rows, columns = weight.shape
    shape = Shape(rows, columns, inputs.numel() // max(1, inputs[-1]), dtype, None)
    return shape if shape.multiplications >= probe_cpu.SMALLEST else None


def _is_float32(weight: SparseWeight) -> bool:
    return weight.parameter.dtype == torch.float32


def _convolution(weight: SparseWeight, inputs: torch.Size) -> Convolution:
    """Raises ValueError: why it cannot be packed."""
    if not isinstance(weight.module, nn.Conv2d) or len(inputs) != 4:
        raise ValueError("of convolutions those of batches of images are packed")
    window, (rows, columns, *_) = convolution_cpu.window_of(weight.module), weight.shape
    last = weight.parameter.is_contiguous(memory_format=torch.channels_last)
    pattern = weight.pattern.by_rows
    return Convolution(rows, columns, inputs[0], (inputs[2], inputs[3]), window, pattern, last)


def measured(shape: Shape | Convolution, device: torch.device) -> dict[str, Times]:
    """The times of every path for this shape."""
    return probe_cpu.probe(shape)


def packed(
    own: layer.Layer, path: str, times: dict[str, Times], shape: Shape | Convolution
) -> Packed | convolution_cpu.Packed:
    """What the products of a layer read by a path."""
    sides = (shape.rows, shape.columns)
    if isinstance(shape, Convolution):
        return convolution_cpu.Packed(sides, shape.window, shape.pattern)
    dense = dense_cpu.best_gradient(times)
    faster = bool(times[path].weight_gradient < times[dense].weight_gradient)
    assert shape.pattern is not None  # of a sparse layer
    return Packed(sides, shape.dtype, shape.pattern, faster, dense)
