"""What is no product with a weight: attention and GELU by nmrun's kernels on the CPU, where they are
right and faster.

Under ``torch.compile`` and tracers, where gradients are wanted and for what the kernels do not take, these
layers compute as torch does.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.fast import measurement
from nmrun.fast.cpu import probe
from nmrun.fast.cpu.kernels import bf16, fused
from nmrun.fast.measurement import FASTER, Choice
from nmrun.fast.sites import compute, devices, places
from nmrun.kernels.layout import has_memory
from nmrun.sparsity.layers import forward_class, is_touched

FUSED, FUSED_BF16 = "fused", "fused bf16"
TORCH = "torch"
FEW = 4  # queries: for fewer, laying out the keys takes longer than the products


class FusedAttention(nn.Module):
    """Scaled dot-product attention in one pass.

    Args:
        low: products of float32 operands are of bfloat16.
    """

    def __init__(self, low: bool = False) -> None:
        super().__init__()
        self.low = low

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :class:`~nmrun.fast.attention.MaskedAttention`."""
        if q.dim() != 4 or q.shape[2] < FEW or not _supports(q, k, v, mask=mask):
            return F.scaled_dot_product_attention(q, k, v, mask)
        return fused.attention(q, k, v, mask, low=self.low)

    def extra_repr(self) -> str:
        return f"low={self.low}"


class FusedGELU(nn.Module):
    """GELU.

    Args:
        tanh: by its approximation.
    """

    def __init__(self, tanh: bool = False) -> None:
        super().__init__()
        self.tanh = tanh

    def forward(self, input: Tensor) -> Tensor:
        """As :func:`torch.nn.functional.gelu`."""
        if not _supports(input):
            return F.gelu(input, approximate="tanh" if self.tanh else "none")
        return fused.gelu(input, self.tanh)

    def extra_repr(self) -> str:
        return f"tanh={self.tanh}"


def _supports(*tensors: Tensor, mask: Tensor | None = None) -> bool:
    """Whether kernels take them, with a mask of any dtype."""
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1 or not dtypes <= {*fused.DTYPES} or not all(map(has_memory, tensors)):
        return False
    given = tensors if mask is None else (*tensors, mask)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    return all(t.device.type == "cpu" and t.numel() for t in tensors)


ATTENTION = "nmrun.fast.attention.MaskedAttention"
# GELUs by the class whose `forward` they have: whether a layer is the approximation by tanh
GELUS: dict[str, Callable[[Any], bool]] = {
    "torch.nn.modules.activation.GELU": lambda module: module.approximate == "tanh",
    "transformers.activations.GELUActivation": lambda module: False,
    "transformers.activations.NewGELUActivation": lambda module: True,
    "transformers.activations.GELUTanh": lambda module: True,
}


def _ways(module: nn.Module, x: Tensor, low: bool) -> dict[str, nn.Module]:
    """What may take a layer's place for an input; ``low``: as int8 is allowed, so is bfloat16."""
    if fused.KERNELS.obstacle():
        return {}
    kind = _kind(module)
    if kind in GELUS:
        return {FUSED: FusedGELU(GELUS[kind](module))}
    ways: dict[str, nn.Module] = {FUSED: FusedAttention()}
    if low and x.dtype == torch.float32 and not bf16.KERNELS.obstacle():
        ways[FUSED_BF16] = FusedAttention(low=True)
    return ways


def fuse(model: nn.Module, sample: Any, tolerance: float | None) -> list[Choice]:
    """Put the faster layers in the place of a deployed model's, see :func:`nmrun.deploy`.

    Args:
        tolerance: how far off attention may be in bfloat16, as a share of the outputs' norm; None
            leaves it in the model's own precision.
    """
    if devices(model) - {"cpu"}:
        return []
    names = {m: name for name, m in model.named_modules() if _kind(m) and name}
    calls: dict[nn.Module, Counter[Any]] = {module: Counter() for module in names}
    inputs: dict[Any, tuple[Tensor, ...]] = {}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        shapes = repr(module), *((t.shape, t.dtype) for t in tensors)
        calls[module][shapes] += 1
        if shapes not in inputs:
            inputs[shapes] = tuple(t.detach().clone() for t in tensors)

    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in names]
    measurement.watched(hooks, partial(compute, model, sample))
    groups: dict[Any, list[nn.Module]] = {}
    for module, counts in calls.items():
        if counts:
            groups.setdefault(tuple(counts.items()), []).append(module)
    choices = []
    for counts, group in groups.items():
        sizes = [(inputs[shapes], count) for shapes, count in counts]
        path, layer, reason = _fastest(group[0], sizes, tolerance)
        for module in group:
            if path:
                for parent, name in list(places(model, module)):
                    parent._modules[name] = copy.deepcopy(layer).eval()
            if reason:
                choices.append(Choice(names[module], path, reason, always_dense=True))
    return choices


def _kind(module: nn.Module) -> str:
    """The class that :func:`_ways` knows a layer by; empty for any other layer."""
    kind = forward_class(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name in (ATTENTION, *GELUS) and not is_touched(module) else ""


def _fastest(
    module: nn.Module, sizes: Sequence[tuple[tuple[Tensor, ...], int]], tolerance: float | None
) -> tuple[str | None, nn.Module, str]:
    """Find a layer that computes the same as a module in less time. ``sizes`` are inputs, each with
    how often it occurs. Returns the path and the layer, or None and the module itself if none is
    right and faster; and the reason, with the times of the commonest size."""
    first, _ = max(sizes, key=lambda size: size[1])
    ways, wrong = _ways(module, first[0], tolerance is not None), []
    for name, layer in list(ways.items()):
        limit = tolerance if name == FUSED_BF16 else None
        faults = (_fault(module, layer, inputs, limit) for inputs, _ in sizes)
        if fault := next(filter(None, faults), ""):
            wrong.append(f"{name}: {fault}")
            del ways[name]
    if not ways:
        return None, module, "; ".join(wrong)
    arms = {TORCH: module} | ways
    total, timing = dict.fromkeys(arms, 0.0), ""
    for inputs, count in sizes:
        durations = probe.side_by_side(*(partial(arm, *inputs) for arm in arms.values()))
        for name, ms in zip(arms, durations, strict=True):
            total[name] += ms * count
        if inputs is first:
            listed = ", ".join(f"{n} {ms:.3g} ms" for n, ms in zip(arms, durations, strict=True))
            timing = f"{' x '.join(map(str, first[0].shape))}: {listed}"
    best = min(ways, key=lambda name: total[name])
    ratio = total[TORCH] / total[best]
    path = best if ratio > 1 / FASTER else None
    return path, arms[path or TORCH], "; ".join([f"{timing} ({ratio:.2f}x)", *wrong])


def _fault(
    module: nn.Module, layer: nn.Module, inputs: Sequence[Tensor], limit: float | None
) -> str:
    """What is wrong with a layer in the place of a module, empty if nothing is; ``limit``: how far
    off it may be, None for within rounding."""
    expected = module(*(t.float() for t in inputs))
    if limit is None:
        return measurement.fault(partial(layer, *inputs), expected)
    near, how = measurement.nearness(layer(*inputs), expected, limit)
    return "" if near else how
