"""Linear layers by cuSPARSELt: what :class:`nmrun.fast.backends24.Path` wants, for 16-bit numbers
and for FP8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast.kernels import cusparselt, pack24
from nmrun.products import simulated

Parts = list[Tensor]
# tokens: a dense operand of 16-bit numbers has to have a multiple of 8, and fp8 of 16
ROUND_UP = 16


def padded(x: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """A matrix with zeros up to a multiple of rows (dim 0) or columns (1); itself where there is
    nothing to add, which ``pad`` copies.
    """
    missing = -x.shape[dim] % multiple
    return functional.pad(x, (0, 0, 0, missing) if dim == 0 else (0, missing)) if missing else x


def pack(weight: Tensor, other: Tensor | None) -> tuple[Parts, Parts]:
    """As ``Path.pack``.

    Args:
        weight: W, (rows, columns), in bfloat16 or float16.
        other: V, of its shape, or None.

    Returns:
        W, and V^T where there is a V.
    """
    parts = [pack24.compressed(weight, weight.dtype)]
    return parts, [] if other is None else [pack24.compressed(other.t(), other.dtype)]


def rewrite(parts: Parts, weight: Tensor) -> None:
    """As ``Path.rewrite``.

    Args:
        parts: what is overwritten.
        weight: (rows, columns), stored by rows or by columns.
    """
    pack24.compressed(weight, parts[0].dtype, out=parts[0])


def multiply(x: Tensor, parts: Parts, bias: Tensor | None, algorithm: int = 0) -> Tensor:
    z = cusparselt.multiply(parts[0], padded(x, ROUND_UP), bias, algorithm=algorithm)
    return z[: len(x)]


def algorithms(x: Tensor, parts: Parts) -> int:
    return cusparselt.algorithms(parts[0], padded(x, ROUND_UP))


def pack_fp8(weight: Tensor, other: Tensor | None) -> tuple[Parts, Parts]:
    """As :func:`pack`, with W rounded to e4m3fn and V^T to e5m2; each with its scale.

    Args:
        weight: W, (rows, columns).
        other: V, of its shape, or None.

    Returns:
        W, and V^T where there is a V.
    """
    values, scale = simulated.quantize(weight, simulated.FORWARD_FP8)
    parts_t: Parts = []
    # torch compresses e4m3 alone of the two; numbers of e5m2 are numbers of bfloat16 as well
    if other is not None:
        values_t, scale_t = simulated.quantize(other.t(), simulated.BACKWARD_FP8)
        parts_t = [pack24.compressed(values_t.bfloat16(), torch.bfloat16), scale_t]
    return [pack24.compressed(values, simulated.FORWARD_FP8), scale], parts_t


def rewrite_fp8(parts: Parts, weight: Tensor) -> None:
    """As :func:`rewrite`, of what :func:`pack_fp8` returned.

    Args:
        parts: what is overwritten.
        weight: (rows, columns), stored by rows or by columns.
    """
    forward = parts[0].dtype == simulated.FORWARD_FP8
    values, scale = simulated.quantize(
        weight, simulated.FORWARD_FP8 if forward else simulated.BACKWARD_FP8
    )
    pack24.compressed(values if forward else values.bfloat16(), parts[0].dtype, out=parts[0])
    parts[1].copy_(scale)


def _operand(x: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """(x as the library takes it, its scale)."""
    forward = parts[0].dtype == simulated.FORWARD_FP8
    kind = simulated.FORWARD_FP8 if forward else simulated.BACKWARD_FP8
    values, scale = simulated.quantize(padded(x, ROUND_UP), kind)
    return values.to(parts[0].dtype), scale


def multiply_fp8(x: Tensor, parts: Parts, bias: Tensor | None, algorithm: int = 0) -> Tensor:
    values, scale = _operand(x, parts)
    # the library takes no scales that lie on the device; before them float16 would overflow
    out = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    z = cusparselt.multiply(parts[0], values, out=out, algorithm=algorithm)
    return unscaled(z[: len(x)], parts[1], scale, bias, x.dtype)


def algorithms_fp8(x: Tensor, parts: Parts) -> int:
    out = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    return cusparselt.algorithms(parts[0], _operand(x, parts)[0], out)


def unscaled(
    z: Tensor, scale: Tensor, scale_x: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``z / scale / scale_x + bias``, computed in float32 and rounded once, contiguous."""
    out = torch.empty(z.shape, dtype=dtype, device=z.device)
    # with a dimension it makes the product float32
    factor = (scale.reciprocal() * scale_x.reciprocal()).view(1)
    return (
        torch.mul(z, factor, out=out)
        if bias is None
        else torch.addcmul(bias.float(), z, factor, out=out)
    )
