"""GELU on the CPU: ``nm_gelu.c``, for processors with AVX-512. It is computed in float32 and rounded once."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from nmrun.kernels import compiler
from nmrun.kernels.compiler import BEGIN, END, in_parts

DTYPES = torch.float32, torch.bfloat16
SOURCES = "nm_scratch", "nm_numbers", "nm_gelu"
FLAGS = ("-ffp-contract=off", "-fno-math-errno")
LINE = 64  # numbers: threads write lines of their own


def obstacle() -> str:
    """Why there is no such kernel on this machine; empty if there is one."""
    library = _library()
    if library is None:
        return "no C compiler works here (cc, gcc, clang or $CC)"
    return "" if hasattr(library, "nm_gelu") else "this processor has no AVX-512"


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.gelu`, or its approximation by ``tanh``; x is float32 or bfloat16."""
    x = x.contiguous()
    out, low, size = torch.empty_like(x), x.dtype == torch.bfloat16, x.numel()
    operands = (x.data_ptr(), out.data_ptr(), int(tanh), int(low), BEGIN, END)
    in_parts(_loaded().nm_gelu, operands, size, size, LINE)
    return out


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None or not hasattr(library, "nm_gelu"):
        raise RuntimeError(f"GELU: {obstacle()}")
    return library


@cache
def _library() -> ctypes.CDLL | None:
    library = compiler.library("nm_gelu", SOURCES, FLAGS, __package__)
    if library is not None and hasattr(library, "nm_gelu"):
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.nm_gelu.argtypes = [*[pointer] * 2, *[size] * 4]
    return library
