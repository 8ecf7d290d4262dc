"""Whether the layers of a run are computed by 2:4 products, and by which: decided before training,
by measurement.

Masks alone make nothing faster. Here every sparse linear layer that hardware can take is tested and
timed on the GPU at hand, at the size that it has in this run, and gets the fastest path that is
right, if one is faster than the dense layer. What was found is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from nmrun import ranks
from nmrun.errors import ConfigError
from nmrun.products import backends24, layer, probe24, simulated
from nmrun.products.linear24 import Packed
from nmrun.products.probe24 import Shape, Times
from nmrun.ranges import ACCELERATION
from nmrun.sparsity.weight import SparseWeight

# of rows and columns, without FP8 and with it; paths that want more say so when tried
MULTIPLE = {
    False: 16,
    True: 32,
}


class Phase(Protocol):
    """What is asked of a recipe here."""

    transposable: bool
    dense_forward: bool

    @property
    def is_sparse(self) -> bool: ...


class Sparsified(Protocol):
    """What is asked of a handle here."""

    sparse: list[SparseWeight]

    @property
    def recipe(self) -> Phase: ...


@dataclass(frozen=True)
class Choice:
    """What one layer got: a ``path``, or None with the ``reason``; its ``shape`` where it was
    measured.
    """

    name: str
    path: str | None
    reason: str
    shape: Shape | None = None


def accelerate(
    handle: Sparsified,
    sample: Callable[[], object],
    mode: str = "auto",
    accumulate: int = 1,
    why_not: str = "",
) -> list[Choice]:
    """Let the sparse linear layers of ``handle`` train through 2:4 products where that is right and
    faster; returns what each got.

    ``sample()`` passes one micro-batch through the model, under the autocast of the training: it is
    called once, without gradients, to see each layer's tokens and dtype. mode ``auto`` takes what
    is faster than dense; ``force`` the fastest right path even where it is not; the name of a path
    of ``nmrun.products.backends24.PATHS`` that path, where it is right; ``off`` nothing.
    ``accumulate``: the micro-batches of a step, which share one packing; ``why_not``: a reason
    against all of it that is known beforehand. Where several processes train, rank 0 decides. With
    ``fp8`` of :func:`nmrun.sparsify`, dense is FP8 simulated.

    The dense weights stay the parameters, so optimizers, checkpoints and recipes see no difference.
    Acts in training mode, while the weights are N:M. Results differ from the masked dense layer by
    the rounding of the dtype. Raises ConfigError where no layer can be accelerated and mode is not
    ``auto``.
    """
    if mode not in ACCELERATION:
        raise ConfigError(f"acceleration={mode}: it takes {', '.join(ACCELERATION)}")
    for weight in handle.sparse:
        if weight.layer is not None:
            weight.layer.packed = None
    if mode == "off" or not handle.sparse:
        return []
    device = handle.sparse[0].dense.device
    why_not = why_not or obstacle(device)
    seen = {} if why_not else _seen(handle.sparse, sample)
    choices = []
    for weight in handle.sparse:
        reason, shape = (
            (why_not, None)
            if why_not
            else _eligible(weight, handle.recipe, seen.get(weight.module))
        )
        if shape is None:
            choices.append(Choice(weight.name, None, reason))
            continue
        times = ranks.from_leader(probe24.probe(shape, device) if ranks.leads() else {})
        path, reason = _best(times, accumulate, mode, "FP8 simulated" if shape.fp8 else "dense")
        if path is not None:
            weight_path = min(
                (name for name, t in times.items() if not t.wrong),
                key=lambda name: times[name].weight_gradient,
            )
            _install(
                weight, handle.recipe, path, shape, None if weight_path == "dense" else weight_path
            )
        choices.append(Choice(weight.name, path, reason, shape))
    if mode != "auto" and not any(choice.path for choice in choices):
        reasons = "; ".join(dict.fromkeys(choice.reason for choice in choices))
        raise ConfigError(
            f"trainer.acceleration={mode}: no layer can be accelerated here ({reasons})"
        )
    return choices


def lines(choices: Sequence[Choice]) -> list[str]:
    """What was decided, for the reader: a table of the layers that were measured, or one line why
    none was.
    """
    if not choices:
        return []
    taken = [choice for choice in choices if choice.path]
    if not any(choice.shape for choice in choices):
        return [
            f"masks only, nothing is accelerated: {'; '.join(dict.fromkeys(choice.reason for choice in choices))}"
        ]
    said = [
        f"2:4 products in {len(taken)} of {len(choices)} sparse layers"
        if taken
        else "masks only: no 2:4 product is faster than dense"
    ]
    groups: dict[tuple[str | None, Shape | None, str], list[str]] = {}
    for choice in choices:
        groups.setdefault((choice.path, choice.shape, choice.reason), []).append(choice.name)
    for (path, shape, reason), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        said.append(
            f"  {path or 'dense'}: {names[0]}{more}"
            + (f", {shape}" if shape else "")
            + f": {reason}"
        )
    return said


def _seen(
    weights: Sequence[SparseWeight], sample: Callable[[], object]
) -> dict[nn.Module, tuple[int, torch.dtype]]:
    """Tokens and dtype of the inputs of the layers that are called, each at its largest."""
    seen: dict[nn.Module, tuple[int, torch.dtype]] = {}

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        tokens = x.numel() // max(1, x.shape[-1])
        if tokens >= seen.get(module, (0,))[0]:
            seen[module] = tokens, simulated.compute_dtype(x)

    hooks = [weight.module.register_forward_pre_hook(look) for weight in weights]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            sample()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def obstacle(device: torch.device) -> str:
    """Why nothing can be accelerated on this device; empty if something might."""
    if device.type != "cuda":
        return "no CUDA device"
    return (
        ""
        if torch.cuda.get_device_capability(device)[0] >= 8
        else "this GPU has no sparse tensor cores"
    )


def _eligible(
    weight: SparseWeight, recipe: Phase, seen: tuple[int, torch.dtype] | None
) -> tuple[str, Shape | None]:
    """The reason why a layer cannot be accelerated, or the shape that can be tried."""
    if weight.is_sharded:
        return "its weight is sharded (FSDP)", None
    if weight.parameter.dim() != 2:
        return "torch has no sparse convolution", None
    if not weight.pattern.fits_2_4:
        return f"{weight.pattern} weights do not fit into 2:4", None
    if seen is None or not layer.replaceable(weight):
        return "it is not called as a layer", None
    tokens, dtype = seen
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


def _best(
    times: Mapping[str, Times], accumulate: int, mode: str, without: str
) -> tuple[str | None, str]:
    """The path that a layer gets, and what was found; ``without`` is what the layer does without a
    path.
    """
    dense = times["dense"].step(accumulate)
    allowed = {
        name: t for name, t in times.items() if name != "dense" and mode in ("auto", "force", name)
    }
    right = {name: t.step(accumulate) for name, t in allowed.items() if not t.wrong}
    if not right:
        return None, "; ".join(
            f"{name}: {t.wrong}" for name, t in allowed.items()
        ) or f"{mode} computes nothing like this"
    name = min(right, key=lambda name: right[name])
    told = f"{without} {dense:.3f} ms, {name} {right[name]:.3f} ms ({dense / right[name]:.2f}x)"
    return (name if mode != "auto" or right[name] < dense else None), told


def _install(
    weight: SparseWeight, recipe: Phase, path: str, shape: Shape, weight_path: str | None
) -> None:
    layer.ensured(weight)
    own = weight.layer
    other, matrix = own.matrix(own.input_weight), own.matrix(weight.weight)
    own.packed = Packed(path, matrix, other, shape.dtype, shape.both, weight_path)
    own.active, own.uses_packed = not recipe.dense_forward, recipe.is_sparse
    if own.pack not in weight.dependents:
        weight.dependents.append(own.pack)
    own.pack(weight)
