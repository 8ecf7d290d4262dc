"""Linear layers around pruned activations on CPUs: products with the activations packed anew in every
pass, as operators that autograd and ``torch.compile`` know.

By the equations of ``nmrun.step.activations``, with Z = m * A of A = relu(B)^2, B = X V^T::

    the layer that reads Z     Y = Z W^T     dZ = dY W, where Z is not 0     dW = dY^T Z
    the layer that feeds it    dX = dB V     dV = dB^T X     with dB, which is 0 where Z is

What is 0 for whatever reason is left out: the squared ReLU's own zeros and those of a dropout too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.fast.cpu import onednn, probe
from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.measurement import (
    FASTER,
    ONEDNN,
    PACKED_ACTIVATIONS,
    Choice,
    Times,
    agreed,
    first_input,
    is_faster,
    watched,
)
from nmrun.fast.operators import operator
from nmrun.patterns import Pattern
from nmrun.products.layer import Layer
from nmrun.products.simulation import compute_dtype
from nmrun.sparsity.layers import is_plain_linear, own_forward
from nmrun.sparsity.weight import SparseWeight
from nmrun.step.activations import keep_largest

NAME = PACKED_ACTIVATIONS
READS, FEEDS = "reads", "feeds"


class Activations(Protocol):
    """What is asked of activations here: see :class:`nmrun.step.activations.SparseActivations`."""

    sparse: bool
    pattern: Pattern | None
    modules: list[str]
    sparse_steps: range | None


def install(module: nn.Module, role: str, by_onednn: bool, activations: Activations) -> None:
    """Let a linear layer compute its products so in training, in float32, in steps that prune; in all other
    passes as before. ``role``: it ``reads`` the activations, or ``feeds`` them, its dense product then
    oneDNN's with ``by_onednn``."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[-1:] != weight.shape[1:]:  # kernels would read past its end
            return functional.linear(x, weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        if role == READS:
            y = reads(flat, weight, bias)
        else:
            y = feeds(flat, weight, bias, by_onednn)
        return y.view(*x.shape[:-1], len(weight))

    def when(module: nn.Module, x: Tensor) -> bool:
        return activations.sparse and onednn.takes(module, x)

    onednn.give_forward(module, product, when)


def packed(matrix: Tensor, turned: bool = False) -> list[PackedMatrix]:
    """What is not 0 of a matrix (rows, columns), and of its transpose if asked for."""
    shape = matrix.shape
    sides = (shape, shape[::-1]) if turned else (shape,)
    matrices = [PackedMatrix.empty(*size) for size in sides]
    products.pack(matrix.contiguous(), *matrices)
    return matrices


@operator("reads_cpu", lambda z, weight, bias: z.new_empty(len(z), len(weight)))
def reads(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``z W^T + bias`` (tokens, outputs), with z (tokens, features), mostly 0; its gradient where z
    is 0 is 0."""
    (rows,) = packed(z)
    y = rows.multiply(weight.t(), turned=True)
    return y if bias is None else y.add_(bias)


@operator("reads_back_cpu", lambda z, weight, dy: (z.new_empty(z.shape), z.new_empty(weight.shape)))
def reads_back(z: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dZ (tokens, features) and dW (outputs, features)."""
    rows, turned = packed(z, turned=True)
    dz = rows.sampled(weight, dy.t())
    return dz, turned.multiply(dy, turned=True).t().contiguous()


@operator("feeds_cpu", lambda x, weight, bias, by_onednn: x.new_empty(len(x), len(weight)))
def feeds(x: Tensor, weight: Tensor, bias: Tensor | None, by_onednn: bool) -> Tensor:
    """``x V^T + bias`` (tokens, features), whose gradient is mostly 0."""
    if by_onednn:
        return onednn.product(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


@operator("feeds_back_cpu", lambda db, x, weight: (x.new_empty(x.shape), x.new_empty(weight.shape)))
def feeds_back(db: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dX (tokens, inputs) and dV (features, inputs)."""
    rows, turned = packed(db, turned=True)
    dx = rows.multiply(weight, turned=True)
    return dx, turned.multiply(x, turned=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _reads_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dz, dw = reads_back(*ctx.saved_tensors, dy)
    return dz, dw, dy.sum(0) if ctx.needs_input_grad[2] else None


def _feeds_backward(ctx: Any, db: Tensor) -> tuple[Tensor | None, ...]:
    dx, dv = feeds_back(db, *ctx.saved_tensors)
    return dx, dv, db.sum(0) if ctx.needs_input_grad[2] else None, None


reads.register_autograd(_reads_backward, setup_context=_save)
feeds.register_autograd(_feeds_backward, setup_context=_save)


@dataclass(frozen=True)
class ActivationShape:
    """A linear layer in training that ``reads`` or ``feeds`` activations: rows = outputs, columns =
    inputs, tokens of one micro-batch, ``pattern`` of the activations. float32."""

    rows: int
    columns: int
    tokens: int
    role: str
    pattern: Pattern

    @property
    def multiplications(self) -> int:
        """Of a dense product."""
        return self.rows * self.columns * self.tokens

    @property
    def paths(self) -> tuple[str, ...]:
        """What is tried."""
        return ("dense", ONEDNN, NAME) if onednn.available() else ("dense", NAME)

    def __str__(self) -> str:
        size = f"{self.columns} to {self.rows}, {self.tokens} tokens"
        return f"{size}, float32, {self.role} {self.pattern} activations"


def measure(shape: ActivationShape) -> dict[str, Times]:
    """The times of the layer by every path: the forward product, and both gradients as one."""
    sizes = (shape.rows, shape.columns), (shape.tokens, shape.columns), (shape.tokens, shape.rows)
    weight, x, d = probe.normal(*sizes)
    reading = shape.role == READS
    sparse = x if reading else d
    sparse.copy_(keep_largest(sparse.relu().square_(), shape.pattern))
    zeros = (x != 0) if reading else torch.ones_like(x)  # what masks the input's gradient

    def dense(product: Callable[[Tensor, Tensor], Tensor]) -> tuple[probe.Call, ...]:
        return (
            lambda: product(x, weight),
            lambda: (product(d, weight.t()), product(d.t(), x.t())),
        )

    calls: probe.Calls = {"dense": dense(functional.linear)}
    if ONEDNN in shape.paths:
        calls[ONEDNN] = dense(onednn.product)
    if reading:
        calls[NAME] = lambda: reads(x, weight, None), lambda: reads_back(x, weight, d)
    else:
        fastest_forward = calls[ONEDNN if ONEDNN in calls else "dense"][0]
        calls[NAME] = fastest_forward, lambda: feeds_back(d, x, weight)
    forward, (dx, dw) = calls["dense"][0](), calls["dense"][1]()
    made, gradients = calls[NAME]
    checks = (made, forward), (lambda: gradients()[0], dx * zeros), (lambda: gradients()[1], dw)
    return probe.tried(calls, {NAME: checks})


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
    """Let the linear layers next to pruned activations train with these packed, on a CPU in float32.
    They do where that is right and faster than what they have got already, by the ``choices`` of
    :func:`nmrun.accelerate`. Returns what those got that were measured.

    A layer that prunes its activations in every step packs its weight no more. Results differ from
    the dense products by the rounding of float32. Where several processes train, rank 0 decides. Modes
    are ``auto`` and ``force``, which packs also where that is slower; with any other nothing is packed.
    ``known`` has times by shape in place of measured ones.
    """
    pattern = activations.pattern
    if pattern is None or mode not in ("auto", "force") or products.KERNELS.obstacle():
        return []
    before = {choice.name: choice for choice in choices}
    layers = {weight.module: weight.layer for weight in sparse}
    names, results = {module: name for name, module in model.named_modules()}, list[Choice]()
    for module, (role, size) in _around(model, activations.modules, sample).items():
        rows = module.weight.numel() // size[-1]
        shape = ActivationShape(rows, size[-1], size.numel() // size[-1], role, pattern)
        small = shape.multiplications < probe.SMALLEST
        if small or not _has_plain_products(module, layers.get(module)):
            continue
        times = agreed(shape, known, functools.partial(probe.measured, shape, by=measure))
        name = f"{names[module]}.weight"
        always = activations.sparse_steps is None
        path, reason = _best(times, before.get(name), mode, accumulate, always)
        if path is not None:
            by_onednn = role == FEEDS and is_faster(times, ONEDNN)
            install(module, role, by_onednn, activations)
            layer = layers.get(module)
            if layer is not None and always:
                layer.packed = None
        results.append(Choice(name, path, reason, shape, times, always_dense=True))
    return results


def _best(
    times: Mapping[str, Times], before: Choice | None, mode: str, accumulate: int, always: bool
) -> tuple[str | None, str]:
    """Whether a layer packs activations, and what was found. Where it does not ``always``, a packed
    weight has to be kept up beside them.
    """
    candidate = times[NAME]
    if candidate.wrong:
        return None, f"{NAME}: {candidate.wrong}"
    cost = candidate.dense
    rivals = {name: t.dense for name, t in times.items() if name != NAME and not t.wrong}
    if before is not None and before.is_sparse:
        product = before.times[str(before.path)]
        rivals[f"{before.path} weight"] = product.step(accumulate) + min(
            t.weight_gradient for t in before.times.values() if not t.wrong
        )
        cost += 0 if always else product.pack / accumulate
    rival = min(rivals, key=lambda name: rivals[name])
    faster = cost < FASTER * rivals[rival]
    comparison = f"{rival} {rivals[rival]:.3f} ms, {NAME} {cost:.3f} ms"
    return (
        NAME if faster or mode == "force" else None,
        f"{comparison} ({rivals[rival] / cost:.2f}x)",
    )


def _has_plain_products(module: Any, layer: Layer | None) -> bool:
    """Whether a layer computes X W^T and its gradients by whatever way, and no estimates of them."""
    current = getattr(own_forward(module), "__module__", "nmrun.fast.")
    other = layer is not None and (layer.mvue or layer.fp8 or layer.other_input_gradient)
    is_trained = type(module.weight) is nn.Parameter and module.weight.requires_grad
    return is_trained and not other and current.startswith(("nmrun.products.", "nmrun.fast."))


def _around(
    model: nn.Module, names: Sequence[str], sample: Callable[[], object]
) -> dict[Any, tuple[str, torch.Size]]:
    """The linear layers in float32 whose very output goes into the modules of these names, or that
    take in what comes out: their role, and the shape of their input."""
    roles: dict[Any, tuple[str, torch.Size]] = {}
    last: dict[str, Any] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        x: Tensor = first_input(args, kwargs)
        if x is last.get("pruned") and compute_dtype(x) == torch.float32:
            roles[module] = READS, x.shape

    def behind(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        last["made"], last["made by"] = output, (module, first_input(args, kwargs).shape)

    def prunes(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        x: Tensor = first_input(args, kwargs)
        last["pruned"] = output
        if x is last.get("made") and x.dtype == torch.float32:
            feeding, shape = last["made by"]
            roles.setdefault(feeding, (FEEDS, shape))

    hooks = [
        module.register_forward_hook(prunes, with_kwargs=True)
        for module in map(model.get_submodule, names)
    ]
    for module in model.modules():
        if is_plain_linear(module):
            hooks += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(behind, with_kwargs=True),
            ]
    watched(hooks, sample)
    return roles
