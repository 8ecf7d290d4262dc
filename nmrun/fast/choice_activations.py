"""Which layers around pruned activations pack them (``activations_cpu``): decided before training, by
measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nmrun import ranks
from nmrun.fast import activations_cpu, dense_cpu, probe_activations, probe_cpu
from nmrun.fast.acceleration import Choice, watched
from nmrun.fast.activations_cpu import FEEDS, NAME, READS
from nmrun.fast.kernels import cpu_products
from nmrun.fast.probe_activations import Around
from nmrun.fast.times import Times
from nmrun.patterns import Pattern
from nmrun.products.layer import Layer
from nmrun.products.simulated import compute_dtype
from nmrun.sparsity.layers import forward_class, is_conv1d
from nmrun.sparsity.weight import SparseWeight


class Activations(activations_cpu.Pruned, Protocol):
    """What is asked of activations here: see :class:`nmrun.step.activations.SparseActivations`."""

    pattern: Pattern | None
    modules: list[str]
    sparse_steps: range | None


def pack_activations(
    model: nn.Module,
    activations: Activations,
    sample: Callable[[], object],
    choices: Sequence[Choice],
    sparse: Iterable[SparseWeight] = (),
    mode: str = "auto",
    accumulate: int = 1,
    known: Mapping[str, Mapping[str, Times]] | None = None,
) -> list[Choice]:
    """Let the linear layers next to pruned activations train with these packed, on a CPU in float32,
    where that is right and faster than what the layers have got already.

    A layer that prunes its activations in every step packs its weight no more. Results differ from
    the dense products by the rounding of float32. Where several processes train, rank 0 decides.

    Args:
        model: on the CPU.
        activations: of it.
        sample: as of :func:`nmrun.fast.acceleration.accelerate`.
        choices: what that function returned.
        sparse: the model's sparse weights.
        mode: ``auto``; ``force`` packs where it is right, even where it is slower; with any other
            nothing is packed.
        accumulate: the micro-batches of a step.
        known: times by shape that are taken in place of measured ones.

    Returns:
        What the layers got that were measured.
    """
    pattern = activations.pattern
    if pattern is None or mode not in ("auto", "force") or not cpu_products.available():
        return []
    before = {choice.name: choice for choice in choices}
    layers = {weight.module: weight.layer for weight in sparse}
    names, found = {module: name for name, module in model.named_modules()}, list[Choice]()
    for module, (role, size) in _around(model, activations.modules, sample).items():
        rows = module.weight.numel() // size[-1]
        shape = Around(rows, size[-1], size.numel() // size[-1], role, pattern)
        small = shape.multiplications < probe_cpu.SMALLEST
        if small or not _plain(module, layers.get(module)):
            continue
        times = (known or {}).get(str(shape)) or ranks.from_leader(
            probe_cpu.probe(shape, probe_activations.measure) if ranks.leads() else {}
        )
        name = f"{names[module]}.weight"
        always = activations.sparse_steps is None
        path, reason = _best(times, before.get(name), mode, accumulate, always)
        if path is not None:
            onednn = role == FEEDS and dense_cpu.is_faster(times)
            activations_cpu.install(module, role, onednn, activations)
            layer = layers.get(module)
            if layer is not None and always:
                layer.packed = None
        found.append(Choice(name, path, reason, shape, times, always_dense=True))
    return found


def _best(
    times: Mapping[str, Times], before: Choice | None, mode: str, accumulate: int, always: bool
) -> tuple[str | None, str]:
    """Whether a layer packs activations, and what was found. Where it does not ``always``, a packed
    weight has to be kept up beside them.
    """
    own = times[NAME]
    if own.wrong:
        return None, f"{NAME}: {own.wrong}"
    taken = own.dense
    rivals = {name: t.dense for name, t in times.items() if name != NAME and not t.wrong}
    if before is not None and before.is_sparse:
        product = before.times[str(before.path)]
        rivals[f"{before.path} weight"] = product.step(accumulate) + min(
            t.weight_gradient for t in before.times.values() if not t.wrong
        )
        taken += 0 if always else product.pack / accumulate
    rival = min(rivals, key=lambda name: rivals[name])
    faster = taken < dense_cpu.FASTER * rivals[rival]
    told = f"{rival} {rivals[rival]:.3f} ms, {NAME} {taken:.3f} ms"
    return (
        NAME if faster or mode == "force" else None,
        f"{told} ({rivals[rival] / taken:.2f}x)",
    )


def _plain(module: Any, layer: Layer | None) -> bool:
    """Whether a layer computes X W^T and its gradients by whatever way, and no estimates of them."""
    current = getattr(vars(module).get("forward"), "__module__", "nmrun.fast.")
    other = layer is not None and (layer.mvue or layer.fp8 or layer.other_input_gradient)
    own = type(module.weight) is nn.Parameter and module.weight.requires_grad
    return own and not other and current.startswith(("nmrun.products.", "nmrun.fast."))


def _around(
    model: nn.Module, names: Sequence[str], sample: Callable[[], object]
) -> dict[Any, tuple[str, torch.Size]]:
    """The linear layers in float32 whose very output goes into the modules of these names, or that
    take in what comes out: their role, and the shape of their input."""
    found: dict[Any, tuple[str, torch.Size]] = {}
    last: dict[str, Any] = {}

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0] is last.get("pruned") and compute_dtype(inputs[0]) == torch.float32:
            found[module] = READS, inputs[0].shape

    def behind(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        last["made"], last["made by"] = output, (module, inputs[0].shape)

    def prunes(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        last["pruned"] = output
        if inputs[0] is last.get("made") and inputs[0].dtype == torch.float32:
            feeding, shape = last["made by"]
            found.setdefault(feeding, (FEEDS, shape))

    hooks = [module.register_forward_hook(prunes) for module in map(model.get_submodule, names)]
    for module in model.modules():
        if forward_class(module) is nn.Linear or is_conv1d(module):
            hooks += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(behind),
            ]
    watched(hooks, sample)
    return found
