"""What is no product with a weight: attention and GELU on the CPU by ``nm_attention.c`` and ``nm_gelu.c``,
for processors with AVX-512, where they are right and faster. Sums, softmax and GELU are float32. The
bits of a query's result depend on nothing but the operands.

Under ``torch.compile`` and tracers, where gradients are wanted and for what the kernels do not take, these
layers compute as torch does.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.fast import measurement
from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.sites import Place, compute, devices
from nmrun.kernels.compiler import BEGIN, END, SAME_BITS, CFunctions, in_parts
from nmrun.kernels.layout import has_memory
from nmrun.sparsity.layers import forward_class, is_touched

FUSED, FUSED_BF16 = "fused", "fused bf16"
FEW = 4  # queries: for fewer, laying out the keys takes longer than the products
DTYPES = torch.float32, torch.bfloat16
LINE = 64  # numbers of a result: threads write lines of their own
WORTH = 64  # multiplications that cost as much as a weight in another pass, see in_parts
KERNELS = CFunctions(
    "attention and GELU",
    ("nm_scratch", "nm_vectors", "nm_numbers", "nm_attention", "nm_gelu"),
    (*SAME_BITS, "-Wno-psabi"),
    bf16.__package__,
    {"nm_attention": "pnn", "nm_gelu": "pp" + "n" * 4},
    needs="AVX-512",
)


class _Attention(ctypes.Structure):  # as in nm_attention.c
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "queries", "keys", "width", "values")),
        *((name, ctypes.c_int64 * 3) for name in ("q_apart", "k_apart", "v_apart", "mask_apart")),
        *((name, ctypes.c_int64) for name in ("low", "short_words")),
        ("scale", ctypes.c_double),
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, low: bool = False
) -> Tensor:
    """As :func:`torch.nn.functional.scaled_dot_product_attention`, for inference.

    Args:
        q, k, v: (batch, heads, tokens, width), all float32 or all bfloat16.
        mask: numbers that are added to the scores; of a shape that expands to (batch, heads, queries,
            keys).
        low: operands of the products are rounded to bfloat16 where the processor multiplies it;
            those in bfloat16 always are.

    Returns:
        (batch, heads, queries, width), whose memory is (batch, queries, heads, width).
    """
    library = KERNELS.load()
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    out = q.new_empty(batch, queries, heads, v.shape[3])
    about = _Attention(q.data_ptr(), k.data_ptr(), v.data_ptr(), 0, out.data_ptr())
    about.heads, about.queries, about.keys, about.width, about.values = (
        heads, queries, keys, width, v.shape[3],
    )  # fmt: skip
    about.q_apart[:], about.k_apart[:], about.v_apart[:] = (t.stride()[:3] for t in (q, k, v))
    if mask is not None:
        mask = mask.float().expand(batch, heads, queries, keys)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        about.mask, about.mask_apart[:] = mask.data_ptr(), mask.stride()[:3]
    about.low = q.dtype == torch.bfloat16
    about.short_words = low or about.low
    about.scale = 1 / math.sqrt(width)
    work = 2 * q.numel() * keys // WORTH
    in_parts(library.nm_attention, (ctypes.addressof(about), BEGIN, END), batch * heads, work)
    return out.transpose(1, 2)


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.gelu`, or its approximation by ``tanh``; x is float32 or bfloat16."""
    x = x.contiguous()
    out, low, size = torch.empty_like(x), x.dtype == torch.bfloat16, x.numel()
    operands = (x.data_ptr(), out.data_ptr(), int(tanh), int(low), BEGIN, END)
    in_parts(KERNELS.load().nm_gelu, operands, size, size, LINE)
    return out


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
        few = q.dim() != 4 or q.shape[2] < FEW
        if few or not _supports(q, k, v, mask=mask) or not _fit(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, mask)
        return attention(q, k, v, mask, low=self.low)

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
        return gelu(input, self.tanh)

    def extra_repr(self) -> str:
        return f"tanh={self.tanh}"


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether they agree in batch, heads, keys and width, without broadcasting."""
    keys = q.shape[:2] + k.shape[2:3]
    return k.shape == keys + q.shape[3:] and v.shape[:-1] == keys


def _supports(*tensors: Tensor, mask: Tensor | None = None) -> bool:
    """Whether kernels take them, with a mask of any dtype."""
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1 or not dtypes <= {*DTYPES} or not all(map(has_memory, tensors)):
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
    if KERNELS.obstacle():
        return {}
    tanh = GELUS.get(_kind(place.module))
    return {FUSED: FusedAttention if tanh is None else partial(FusedGELU, tanh(place.module))}


def rough_ways(place: Place) -> Ways:
    """And those in bfloat16, of attention in float32."""
    floats = all(shape[0][1] == torch.float32 for shape in place.shapes)
    obstacle = KERNELS.obstacle() or bf16.KERNELS.obstacle()
    if _kind(place.module) != ATTENTION or not floats or obstacle:
        return {}
    return {FUSED_BF16: partial(FusedAttention, low=True)}


def _kind(module: nn.Module) -> str:
    """The class that a layer is known by; empty for any other layer."""
    kind = forward_class(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name in (ATTENTION, *GELUS) and not is_touched(module) else ""


def fusable(model: nn.Module, sample: Any, apart: bool = False) -> list[Place]:
    """The attentions and GELUs of a deployed model on a CPU that the sample calls. Layers alike share
    what they are given, which is large; ``apart``: each attention has its own."""
    if devices(model) - {"cpu"}:
        return []
    given = defaultdict[str, dict[Any, tuple[Tensor, ...]]](dict)
    places = []
    for name, module in model.named_modules():
        if name and (kind := _kind(module)):
            roundings = 2 if kind == ATTENTION else 1  # it rounds its probabilities, too
            own = given[name if apart and kind == ATTENTION else repr(module)]
            places.append(Place(name, module, given=own, roundings=roundings))
    hooks = [p.module.register_forward_pre_hook(p.see, with_kwargs=True) for p in places]
    measurement.watched(hooks, partial(compute, model, sample))
    return [place for place in places if place.shapes]
