"""Which layers 2:4 products on a GPU can take, and how a layer gets them."""

from __future__ import annotations

import torch

from nmrun.fast import backends24, probe24
from nmrun.fast.linear24 import Packed
from nmrun.fast.probe24 import Shape
from nmrun.fast.times import Times
from nmrun.products import layer
from nmrun.products.layer import Phase
from nmrun.sparsity.weight import SparseWeight

# of rows and columns, without FP8 and with it; paths that want more say so when tried
MULTIPLE = {
    False: 16,
    True: 32,
}


def obstacle(device: torch.device) -> str:
    """Why there are no 2:4 products on this device; empty if there might be."""
    if device.type != "cuda":
        return "no CUDA device"
    capable = torch.cuda.get_device_capability(device)[0] >= 8
    return "" if capable else "this GPU has no sparse tensor cores"


def eligible(
    weight: SparseWeight, recipe: Phase, seen: tuple[torch.Size, torch.dtype] | None
) -> tuple[str, Shape | None]:
    """The reason why a layer cannot be accelerated, or the shape that can be tried."""
    if weight.is_sharded:
        return "its weight is sharded (FSDP)", None
    if weight.layer is not None and weight.layer.input_mvue is not None:
        return layer.ESTIMATED_INPUT, None
    if weight.parameter.dim() != 2:
        return "torch has no sparse convolution", None
    if not weight.pattern.fits_2_4:
        return f"{weight.pattern} weights do not fit into 2:4", None
    if seen is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    tokens, dtype = seen[0].numel() // max(1, seen[0][-1]), seen[1]
    mvue, fp8 = (None, False) if weight.layer is None else (weight.layer.mvue, weight.layer.fp8)
    rows, columns = weight.shape if weight.dim == 1 else reversed(weight.shape)
    if dtype not in backends24.ALLOWED:
        return (
            f"{str(dtype).removeprefix('torch.')}: 2:4 products are of bfloat16 or float16 (trainer.precision)",
            None,
        )
    if rows % MULTIPLE[fp8] or columns % MULTIPLE[fp8]:
        return f"{columns} inputs and {rows} outputs are not multiples of {MULTIPLE[fp8]}", None
    estimated = mvue is not None and mvue.fits_2_4 and not fp8
    return "", Shape(rows, columns, tokens, dtype, _both(weight, recipe), estimated, fp8)


def _both(weight: SparseWeight, recipe: Phase) -> bool:
    """Whether the weight of the input gradient is N:M along the outputs in their order.

    Bi-Mask's is in another order.
    """
    pruned_again = weight.layer is not None and weight.layer.prune_again in weight.dependents
    return recipe.transposable or pruned_again


def measured(shape: Shape, device: torch.device) -> dict[str, Times]:
    """The times of every path for this shape."""
    return probe24.probe(shape, device)


def packed(own: layer.Layer, path: str, times: dict[str, Times], shape: Shape) -> Packed:
    """What the products of a layer read by a path."""
    weight = own.weight
    other, matrix = own.matrix(own.input_weight), own.matrix(weight.weight)
    weight_path = min(
        (name for name, t in times.items() if not t.wrong),
        key=lambda name: times[name].weight_gradient,
    )
    forward, input_gradient, _ = _algorithms(path, times)
    return Packed(
        *(forward, matrix, other, shape.dtype, shape.both),
        None if weight_path == "dense" else _algorithms(weight_path, times)[2],
        input_gradient,
    )


def _algorithms(path: str, times: dict[str, Times]) -> tuple[str, str, str]:
    """The names of a path for the three products."""
    forward, input_gradient, weight_gradient = times[path].algorithms or (path,) * 3
    return forward, input_gradient, weight_gradient
