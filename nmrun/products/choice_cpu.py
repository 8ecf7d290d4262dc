"""Which layers N:M products on the CPU can take, and how a layer gets them."""

from __future__ import annotations

import torch

from nmrun.kernels import cpu_products
from nmrun.products import layer, probe_cpu
from nmrun.products.layer import Phase
from nmrun.products.linear_cpu import Packed
from nmrun.products.probe_cpu import Shape
from nmrun.products.times import Times
from nmrun.sparsity.weight import SparseWeight


def obstacle(device: torch.device) -> str:
    """Why there are no N:M products on this CPU; empty if there might be."""
    return "" if cpu_products.available() else "no C compiler works here, which the CPU's need"


def eligible(
    weight: SparseWeight, recipe: Phase, seen: tuple[int, torch.dtype] | None
) -> tuple[str, Shape | None]:
    """The reason why a layer cannot be accelerated, or the shape that can be tried."""
    if weight.is_sharded:
        return "its weight is sharded (FSDP)", None
    if weight.parameter.dim() != 2:
        return "it is no linear layer", None
    if seen is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    tokens, dtype = seen
    if weight.layer is not None and weight.layer.fp8:
        return "FP8 is simulated, in dense products", None
    if dtype not in probe_cpu.DTYPES or weight.parameter.dtype != torch.float32:
        return f"{str(dtype).removeprefix('torch.')}: packed weights are float32", None
    mvue = None if weight.layer is None else weight.layer.mvue
    rows, columns = weight.shape if weight.dim == 1 else reversed(weight.shape)
    shape = Shape(rows, columns, tokens, dtype, weight.pattern, mvue)
    if shape.multiplications < probe_cpu.SMALLEST:
        return f"its products are too small to gain ({shape})", None
    return "", shape


def measured(shape: Shape, device: torch.device) -> dict[str, Times]:
    """The times of every path for this shape."""
    return probe_cpu.probe(shape)


def packed(own: layer.Layer, path: str, times: dict[str, Times], shape: Shape) -> Packed:
    """What the products of a layer read by a path."""
    faster = bool(times[path].weight_gradient < times["dense"].weight_gradient)
    return Packed((shape.rows, shape.columns), shape.dtype, shape.pattern, faster)
