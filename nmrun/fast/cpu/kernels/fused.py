"""Attention and GELU on the CPU: ``nm_attention.c`` and ``nm_gelu.c``, for processors with AVX-512.

Sums, softmax and GELU are float32. The bits of a query's result depend on nothing but the operands.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from nmrun.kernels.compiler import BEGIN, END, SAME_BITS, CFunctions, in_parts

DTYPES = torch.float32, torch.bfloat16
LINE = 64  # numbers of a result: threads write lines of their own
WORTH = 64  # multiplications that cost as much as a weight in another pass, see in_parts
KERNELS = CFunctions(
    "attention and GELU",
    ("nm_scratch", "nm_vectors", "nm_numbers", "nm_attention", "nm_gelu"),
    (*SAME_BITS, "-Wno-psabi"),
    __package__,
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
