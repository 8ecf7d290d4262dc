"""GELU on the CPU: ``nm_gelu.c``, for processors with AVX-512. It is computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels.compiler import BEGIN, END, CFunctions, in_parts

DTYPES = torch.float32, torch.bfloat16
LINE = 64  # numbers: threads write lines of their own
KERNELS = CFunctions(
    "GELU",
    ("nm_scratch", "nm_numbers", "nm_gelu"),
    ("-ffp-contract=off", "-fno-math-errno"),
    __package__,
    {"nm_gelu": "pp" + "n" * 4},
    needs="AVX-512",
)


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.gelu`, or its approximation by ``tanh``; x is float32 or bfloat16."""
    x = x.contiguous()
    out, low, size = torch.empty_like(x), x.dtype == torch.bfloat16, x.numel()
    operands = (x.data_ptr(), out.data_ptr(), int(tanh), int(low), BEGIN, END)
    in_parts(KERNELS.load().nm_gelu, operands, size, size, LINE)
    return out
