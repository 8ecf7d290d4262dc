"""What is no product with a weight: attention and GELU by nmrun's kernels on the CPU, where they are
right and faster.

Under ``torch.compile`` and tracers, where gradients are wanted and for what the kernels do not take, these
layers compute as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.fast import measurement
from nmrun.fast.cpu.kernels import bf16, fused
from nmrun.fast.sites import Place, compute, devices
from nmrun.kernels.layout import has_memory
from nmrun.sparsity.layers import forward_class, is_touched

FUSED, FUSED_BF16 = "fused", "fused bf16"
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
        """As :class:`~nmrun.fast.sites.MaskedAttention`."""
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


ATTENTION = "nmrun.fast.sites.MaskedAttention"
# GELUs by the class whose `forward` they have: whether a layer is the approximation by tanh
GELUS: dict[str, Callable[[Any], bool]] = {
    "torch.nn.modules.activation.GELU": lambda module: module.approximate == "tanh",
    "transformers.activations.GELUActivation": lambda module: False,
    "transformers.activations.NewGELUActivation": lambda module: True,
    "transformers.activations.GELUTanh": lambda module: True,
}


Ways = dict[str, Callable[[], nn.Module]]


def exact_ways(place: Place) -> Ways:
    """Layers that compute within rounding what an attention or GELU does."""
    if fused.KERNELS.obstacle():
        return {}
    tanh = GELUS.get(_kind(place.module))
    return {FUSED: FusedAttention if tanh is None else partial(FusedGELU, tanh(place.module))}


def rough_ways(place: Place) -> Ways:
    """And those in bfloat16, of attention in float32."""
    floats = all(shape[0][1] == torch.float32 for shape in place.shapes)
    obstacle = fused.KERNELS.obstacle() or bf16.KERNELS.obstacle()
    if _kind(place.module) != ATTENTION or not floats or obstacle:
        return {}
    return {FUSED_BF16: partial(FusedAttention, low=True)}


def _kind(module: nn.Module) -> str:
    """The class that a layer is known by; empty for any other layer."""
    kind = forward_class(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name in (ATTENTION, *GELUS) and not is_touched(module) else ""


def fusable(model: nn.Module, sample: Any) -> list[Place]:
    """The attentions and GELUs of a deployed model on a CPU that the sample calls."""
    if devices(model) - {"cpu"}:
        return []
    places = [Place(name, m) for name, m in model.named_modules() if name and _kind(m)]
    hooks = [p.module.register_forward_pre_hook(p.see, with_kwargs=True) for p in places]
    measurement.watched(hooks, partial(compute, model, sample))
    return [place for place in places if place.shapes]
