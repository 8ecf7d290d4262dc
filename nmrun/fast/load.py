"""``nmrun.load_packed``: an exported model straight into packed layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nmrun.errors import refused
from nmrun.fast import packed
from nmrun.fast.cpu import onednn
from nmrun.fast.cpu.convolution import by_taps
from nmrun.fast.cpu.kernels import bf16, blocks, int8, products
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.blocks import BlockMatrix
from nmrun.fast.cpu.kernels.int8 import Int8Matrix
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.cpu.kernels.tiles import TiledMatrix
from nmrun.fast.cpu.onednn import DenseInt8Linear
from nmrun.fast.cpu.packed_convolution import PackedConvolution
from nmrun.fast.cpu.packed_linear import Bf16Linear, BlockLinear, Int8Linear, PackedLinear
from nmrun.fast.measurement import DENSE_INT8
from nmrun.fast.packed import Line
from nmrun.fast.sites import KEY_VALUE, ConvolutionSite, Site, install, sites
from nmrun.sparsity.layers import check_module

Model = TypeVar("Model", bound=nn.Module)
Maker = Callable[[Tensor | None], nn.Module]  # of a layer from its bias


def load_packed(path: Path | str, model: Model) -> Model:
    """Load a file of ``nmrun export RUN --format packed`` into packed layers, in place, for inference
    on the CPU.

    Linear layers that the file holds packed become packed layers, and so do convolutions of a float32
    model; dense weights are in memory one at a time. Other weights are unpacked. Nothing is measured: to
    keep a layer dense where dense is faster, as convolutions of a few images are, load dense weights
    (:func:`nmrun.fast.packed.load`) and call :func:`nmrun.deploy`.

    Args:
        path: the file, or its folder.
        model: the network of the run, on the CPU or on ``meta``. It is set to evaluation.

    Returns:
        The same model.

    Raises:
        ConfigError: for a file that is damaged or of another model, without a C compiler, and for
            an int8 file on a processor without int8 products. The model is unchanged then.
    """
    check_module(model, "load_packed")
    with refused("", ValueError):
        tensors, lines = packed.read(path)
        dense = {name: list(t.shape) for name, t in tensors.items()}
        for line in lines:
            line.drop(dense)
            dense[line.name] = line.shape
        _same_model(model, dense)
        rounded = any(line.scales(tensors) is not None for line in lines)
        if why := (int8 if rounded else products).KERNELS.obstacle():
            raise ValueError(f"packed layers: {why}; nmrun.fast.packed.load reads dense weights")
        layers = _layers(model, tensors, lines)
        names = {_stored(name) for name in layers}
        for line in lines:
            weight = None if line.name in names else line.dense(tensors)
            line.drop(tensors)
            if weight is not None:
                tensors[line.name] = weight
    on_meta = any(p.is_meta for p in model.parameters())
    own = model.state_dict()  # tensors that are assigned would keep the file's dtypes
    tensors = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
    model.load_state_dict(tensors, strict=False, assign=on_meta)
    for module, module_sites in sites(model)[0].items():
        for site in module_sites:
            if site.name in layers:
                site.layer = layers[site.name](site.bias)
        if any(site.layer is not None for site in module_sites):
            install(model, module, module_sites)
    model.eval()
    return model


def _same_model(model: nn.Module, shapes: dict[str, list[int]]) -> None:
    """Raise ValueError unless the file has the weights of this model."""
    expected = {name: list(t.shape) for name, t in model.state_dict().items()}
    first_names: dict[int, str] = {}  # a parameter under a second name may be missing
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if name not in shapes and first in shapes and not parameter.is_meta:
            expected.pop(name, None)
    for name in sorted(expected.keys() | shapes.keys()):
        there, here = shapes.get(name, "missing"), expected.get(name, "missing")
        if there != here:
            raise ValueError(f"the file is of another model: {name} is {there} there, {here} here")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"{name} is on {tensor.device}: packed layers are for the CPU")
        if tensor.is_meta and name not in expected:
            raise ValueError(
                f"{name} is on meta, and the file does not have it: build the model on the CPU"
            )


def _layers(model: nn.Module, tensors: dict[str, Tensor], lines: list[Line]) -> dict[str, Maker]:
    """What makes the packed layers of the model from their biases, by the name of the site."""
    by_name = {line.name: line for line in lines}
    makers: dict[str, Maker] = {}
    for site in (site for group in sites(model)[0].values() for site in group):
        if (line := by_name.get(_stored(site.name))) is not None:
            make = _convolution if isinstance(site, ConvolutionSite) else _linear
            if (maker := make(site, line, tensors)) is not None:
                makers[site.name] = maker
    return makers


def _convolution(site: Any, line: Line, tensors: dict[str, Tensor]) -> Maker | None:
    if site.weight.dtype != torch.float32:
        return None
    matrix = PackedMatrix.packed(by_taps(line.dense(tensors).float()), site.window.positions)
    return partial(PackedConvolution, matrix, site.window)


def _linear(site: Site, line: Line, tensors: dict[str, Tensor]) -> Maker:
    rows = slice(line.shape[0] - len(site.weight), None)
    rows = rows if site.name.endswith(KEY_VALUE) else slice(len(site.weight))
    weight, scales = line.unpacked(tensors).movedim(line.dim, -1)[rows], line.scales(tensors)
    if scales is not None:
        if line.layer == DENSE_INT8 and onednn.available_int8():
            return partial(DenseInt8Linear, weight.contiguous(), scales[rows].clone())
        return partial(Int8Linear, Int8Matrix.of_rounded(weight, scales[rows]))
    weight = weight.to(site.weight.dtype)
    if weight.dtype not in products.DTYPES:
        raise ValueError(f"{line.name} is {weight.dtype}: packed layers are float32 or bfloat16")
    if weight.dtype == torch.float32 or bf16.KERNELS.obstacle():
        return partial(PackedLinear, TiledMatrix.packed(weight))
    # AMX is the faster for any number of tokens, without it few tokens are slower in blocks
    height = None if blocks.tiles_obstacle() else blocks.height_of(weight != 0)
    if height is not None:
        return partial(BlockLinear, BlockMatrix.packed(weight, height=height))
    return partial(Bf16Linear, Bf16Matrix.packed(weight))


def _stored(name: str) -> str:
    """The weight that a site is a part of."""
    return name.partition("[")[0]
