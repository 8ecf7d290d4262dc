"""Whether the layers of a run are computed by N:M products, and by which: decided before training,
by measurement.

Masks alone make nothing faster. Here every sparse linear layer that the device can take is tested
and timed, at the size that it has in this run. It gets the fastest path that is right, if one is
faster than the dense layer. On a GPU these are 2:4 products (``gpu/``), on a CPU products with
any N:M (``cpu/``). What is dense on a CPU, the whole layer or a phase of it, is computed by
oneDNN where that beats torch's default (``cpu/onednn.py``), and attention of a training in bfloat16
in float32 where torch is faster so. What was found is printed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from nmrun import ranks
from nmrun.errors import ConfigError
from nmrun.fast.cpu import onednn
from nmrun.fast.cpu import probe as on_cpu
from nmrun.fast.gpu import probe as on_gpu
from nmrun.fast.measurement import (
    FASTER,
    FLOAT32,
    ONEDNN,
    Choice,
    Shape,
    Times,
    agreed,
    first_input,
    is_faster,
    watched,
)
from nmrun.products import layer, simulation
from nmrun.products.attention import DotProductAttention
from nmrun.products.layer import Phase
from nmrun.ranges import ACCELERATION, FLAG, check_values, one_of
from nmrun.sparsity.weight import SparseWeight


class Sparsified(Protocol):
    """What is asked of a handle here."""

    model: nn.Module
    by_onednn: list[nn.Module]

    @property
    def sparse(self) -> list[SparseWeight]: ...

    @property
    def recipe(self) -> Phase: ...


def accelerate(
    handle: Sparsified,
    sample: Callable[[], object],
    mode: str = "auto",
    accumulate: int = 1,
    why_not: str = "",
    whole_gradients: bool = False,
    known: Mapping[str, Mapping[str, Times]] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Choice]:
    """Make training faster: let sparse layers multiply with their kept weights alone, where that is
    right and faster than dense.

    Each sparse linear layer, and on a CPU each convolution, is tested and timed at its size in this
    training. On a CPU dense linear layers get oneDNN's products where those are faster, and
    attention of nmrun's own models in bfloat16 is computed in float32 where that is faster.

    Parameters, optimizer state and checkpoints do not change. The products act in training mode,
    while the weights are N:M. Results differ from the masked dense layer by the rounding of the
    dtype. Where several processes train, rank 0 decides. Layers with ``fp8`` of
    :func:`nmrun.sparsify` stay as they are. Called again, it decides anew.

    Args:
        handle: of :func:`nmrun.sparsify`.
        sample: passes one micro-batch through the model, under the autocast of the training. It is
            called at most once, without gradients, to see the shape and dtype of each layer's
            input.
        mode: ``auto`` takes what is faster than dense. ``force`` takes the fastest right path, even
            if dense is faster. The name of a path does so for that path alone: ``packed`` on a CPU,
            those of ``nmrun.fast.gpu.semi_structured.PATHS`` on a GPU. ``off`` takes nothing.
        accumulate: micro-batches of a step; they share the time of one packing.
        why_not: a reason, known beforehand, to accelerate nothing. The choices that are returned
            have it.
        whole_gradients: the loop looks at the gradients of pruned weights even where the recipe
            masks them, as clipping by norm does. Else such layers on a CPU may leave them zero.
        known: times by shape (``str(choice.shape)``) and path, used in place of measuring. A run
            that goes on gets the paths that it had, but those of another GPU are measured anew.
        tell: is called with what is timed next. A large network takes minutes.

    Returns:
        What each layer got, and why: all sparse layers, and the dense ones that were measured.

    Raises:
        ConfigError: for a wrong mode or value; and where no layer can be accelerated,
            unless mode is ``auto`` or ``off``.
    """
    check_values(
        {"acceleration": one_of(*ACCELERATION), "whole_gradients": FLAG},
        {"acceleration": mode, "whole_gradients": whole_gradients},
    )
    _take_back(handle)
    device = next((p.device for p in handle.model.parameters()), torch.device("cpu"))
    side: Any = _side(device)
    sparse = {weight.module: weight for weight in handle.sparse}
    dense = dict[nn.Module, str]()
    if side is on_cpu and not why_not:
        dense = _dense_layers(handle.model, sparse)
    if mode == "off" or not (sparse or dense):
        return []
    why_not = why_not or obstacle(device)
    inputs = _largest_inputs(handle.model, [*dense, *([] if why_not else sparse)], sample)
    layers, total = itertools.count(1), len(handle.sparse) + len(dense)
    library = "" if why_not or side is on_cpu else ranks.from_leader(on_gpu.library(device))

    def times_of(shape: Shape) -> Mapping[str, Times]:
        tell(f"timing products, layer {next(layers)} of {total}")
        return agreed(shape, known, partial(side.measured, shape, device), library)

    if why_not:
        choices = [Choice(weight.name, None, why_not) for weight in handle.sparse]
    else:
        choices = _by_nm_products(handle, side, inputs, times_of, mode, accumulate, whole_gradients)
    if handle.sparse and mode != "auto" and not any(choice.is_sparse for choice in choices):
        reasons = "; ".join(dict.fromkeys(choice.reason for choice in choices))
        raise ConfigError(
            f"trainer.acceleration={mode}: no layer can be accelerated here ({reasons})"
        )
    return choices + _by_torch_otherwise(handle, dense, inputs, times_of)


Inputs = Mapping[nn.Module, tuple[torch.Size, torch.dtype]]
TimesOf = Callable[[Shape], Mapping[str, Times]]  # by path, of a shape


def _take_back(handle: Sparsified) -> None:
    """Undo what an earlier call did."""
    for weight in handle.sparse:
        if weight.layer is not None:
            weight.layer.packed = weight.layer.dense = None
    layer.restore_forward(handle.by_onednn)
    for module in handle.model.modules():
        if isinstance(module, DotProductAttention):
            module.in_float32 = False


# --- layers with a sparse weight ------------------------------------------------------------------


def _by_nm_products(
    handle: Sparsified, side: Any, inputs: Inputs, times_of: TimesOf, mode: str, accumulate: int,
    whole_gradients: bool,
) -> list[Choice]:  # fmt: skip
    """Give the layers of sparse weights N:M products; what stays dense on a CPU, oneDNN's."""
    choices = []
    for weight in handle.sparse:
        reason, shape = side.eligible(weight, handle.recipe, inputs.get(weight.module))
        if shape is None:
            choices.append(Choice(weight.name, None, reason))
            continue
        times = times_of(shape)
        path, reason = _best(times, accumulate, mode)
        if is_faster(times, ONEDNN):
            layer.ensured(weight)
            weight.layer.dense = onednn
        if path not in (None, ONEDNN):
            layer.ensured(weight)
            sparse_layer = weight.layer
            sparse_layer.packed = side.packed(sparse_layer, path, times, shape)
            sparse_layer.whole_gradients = whole_gradients
            sparse_layer.enter(handle.recipe)
            sparse_layer.pack()
        choices.append(Choice(weight.name, path, reason, shape, times))
    return choices


def _best(times: Mapping[str, Times], accumulate: int, mode: str) -> tuple[str | None, str]:
    """The path that a layer gets, and what was found."""
    fallback = ONEDNN if is_faster(times, ONEDNN) else None
    dense = times[fallback or "dense"].step(accumulate)
    comparison = f"dense {times['dense'].step(accumulate):.3f} ms, "
    if fallback:
        comparison += f"{fallback} {dense:.3f} ms, "
    allowed = {
        name: t
        for name, t in times.items()
        if name not in ("dense", ONEDNN) and mode in ("auto", "force", name.split()[0])
    }
    right = {name: t.step(accumulate) for name, t in allowed.items() if not t.wrong}
    if not right:
        return fallback, "; ".join(
            f"{name}: {t.wrong}" for name, t in allowed.items()
        ) or f"{mode} computes nothing like this"
    name = min(right, key=lambda name: right[name])
    comparison += f"{name} {right[name]:.3f} ms ({dense / right[name]:.2f}x)"
    gains = right[name] < FASTER * dense
    return (name if mode != "auto" or gains else fallback), comparison


# --- what has none, on a CPU ----------------------------------------------------------------------


def _dense_layers(model: nn.Module, sparse: Container[nn.Module]) -> dict[nn.Module, str]:
    """The linear layers without a sparse weight, with the names of their weights; then the attention
    modules, with their names."""
    linear, attentions = dict[nn.Module, str](), dict[nn.Module, str]()
    for name, module in model.named_modules():
        if isinstance(module, DotProductAttention):
            attentions[module] = name
        elif module not in sparse and onednn.weight_of(module) is not None:
            linear[module] = f"{name}.weight".lstrip(".")
    return linear | attentions


def _by_torch_otherwise(
    handle: Sparsified, layers: Mapping[nn.Module, str], inputs: Inputs, times_of: TimesOf
) -> list[Choice]:
    """Give dense linear layers the products of oneDNN, and let attention in bfloat16 compute in
    float32, where that is faster than what torch does by itself."""
    choices = []
    for module, name in layers.items():
        shape = on_cpu.otherwise(module, inputs.get(module))
        if shape is None:
            continue
        times = times_of(shape)
        _, path = shape.paths
        before, torchs = "bfloat16" if path == FLOAT32 else "dense", times["dense"].dense
        found = (
            times[path].wrong or f"{times[path].dense:.3f} ms ({torchs / times[path].dense:.2f}x)"
        )
        taken = path if is_faster(times, path) else None
        reason = f"{before} {torchs:.3f} ms, {path} {found}"
        choices.append(Choice(name, taken, reason, shape, times, always_dense=True))
        if isinstance(module, DotProductAttention):
            module.in_float32 = taken is not None
        elif taken is not None:
            onednn.install(module)
            handle.by_onednn.append(module)
    return choices


# --- the model and the device ---------------------------------------------------------------------


def _largest_inputs(
    model: nn.Module, modules: Sequence[nn.Module], sample: Callable[[], object]
) -> dict[nn.Module, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of the inputs of the layers that are called, each at its largest."""
    by_module: dict[nn.Module, tuple[torch.Size, torch.dtype]] = {}

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = first_input(args, kwargs)
        if module not in by_module or x.numel() >= by_module[module][0].numel():
            by_module[module] = x.shape, simulation.compute_dtype(x)

    if not modules:
        return {}
    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    # batch norm in training mode counts this batch, and a run that goes on would count it again
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        watched(hooks, sample)
    finally:
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
    return by_module


def _side(device: torch.device) -> ModuleType | None:
    return {"cuda": on_gpu, "cpu": on_cpu}.get(device.type)


def is_24(device: torch.device) -> bool:
    """Whether products on this device are 2:4."""
    return _side(device) is on_gpu


def obstacle(device: torch.device) -> str:
    """Why nothing can be accelerated on this device; empty if something might."""
    side = _side(device)
    return f"nothing for {device.type}" if side is None else str(side.obstacle(device))
