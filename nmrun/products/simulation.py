"""How the three matrix products of a sparse layer are computed in training.

With input X (tokens, in), output Z (tokens, out) and projected weight W (out, in) they are

    Z = X W^T          the forward product, which sums over the inputs
    dX = dZ W          the input gradient, over the outputs
    dW = dZ^T X        the weight gradient, over the tokens

Hardware for N:M sparsity wants one operand to be N:M along the dimension that is summed over. The
projection does that for Z. For dX a recipe can give another weight, N:M along the outputs (Bi-Mask,
arXiv 2302.06058), or W's minimum-variance unbiased N:M estimate along them. For dW, dZ is replaced
by such an estimate along the tokens, and all three products can be rounded to FP8 (S-STE: Hu et al.
2024, arXiv 2409.09099). Everything here is simulated: the numbers are those of such hardware, the
products are dense.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.sparsity import masks

FORWARD_FP8, BACKWARD_FP8 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(
    x: Tensor, dtype: torch.dtype, stored: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``x`` in an FP8 ``dtype`` with one scale for the whole tensor: ``x`` is about ``values /
    scale``. The scale maps the tensor's largest magnitude to the largest number of the format.
    Returns the values (FP8, or the same numbers as ``stored``) and the scale (float32,
    0-dimensional; 1 for an all-zero tensor). What is not finite becomes NaN."""
    x = x.float()
    largest = x.abs().amax()
    # finite for subnormal numbers too
    scale = (torch.finfo(dtype).max / largest).clamp_max(torch.finfo(torch.float32).max)
    scale = torch.where(largest == 0, 1.0, scale)
    return (x * scale).to(dtype).to(stored or dtype), scale


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    input_weight: Tensor | None = None,
    mvue: Pattern | None = None,
    fp8: bool = False,
    input_mvue: Pattern | None = None,
) -> Tensor:
    """``torch.nn.functional.linear`` with other backward products; without any of the options, the
    same.

    x: (..., in), weight: (out, in), bias: (out) or None; returns (..., out). Under autocast all are
    cast as ``F.linear`` would. input_weight: (out, in), the weight of the input gradient ``dX = dZ
    input_weight``; it gets no gradient itself.

    mvue: the weight gradient is ``E^T X``, E the unbiased estimate of dZ with at most N non-zeros
    in each M consecutive tokens (:func:`nmrun.sparsity.mvue`). Tokens are all leading dimensions of
    x, in order; zeros fill up the last group. input_mvue: likewise, the input gradient is ``dZ E``,
    E the estimate of the weight along the outputs, a multiple of M.

    fp8: operands of the forward product are rounded to e4m3fn, those of the backward products to
    e5m2 (after the estimate); products are summed in float32. The bias and its gradient stay exact.
    """
    # an expert without tokens: there is no largest magnitude, and no gradient to estimate
    if x.numel() == 0:
        return F.linear(x, weight, bias)
    return _Linear.apply(*_autocast(x, weight, bias, input_weight), mvue, fp8, input_mvue)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_weight: Tensor | None,
        mvue: Pattern | None, fp8: bool, input_mvue: Pattern | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight if input_weight is None else input_weight)
        ctx.mvue, ctx.fp8, ctx.input_mvue = mvue, fp8, input_mvue
        if not fp8:
            z = F.linear(x, weight, bias)
            # of several tokens it is a view, which autograd would let nobody write in place
            return torch.ops.aten._unsafe_view(z, z.shape)
        z = _matmul_fp8(x, weight.t(), FORWARD_FP8)
        z = z if bias is None else z + bias
        # torch.compile loses the gradient of a cast that does nothing
        return z if z.dtype == x.dtype else z.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients()
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if ctx.input_mvue is not None:
                weight = masks.mvue(weight, ctx.input_mvue, 0)
            dx = backward_product(dz, weight, ctx.fp8)
        tokens = dz.reshape(-1, dz.shape[-1])
        if ctx.needs_input_grad[2]:
            db = tokens.sum(0)
        if ctx.needs_input_grad[1]:
            if ctx.mvue is not None:
                tokens = estimate(tokens, ctx.mvue)
            dw = backward_product(tokens.t(), x.reshape(-1, x.shape[-1]), ctx.fp8)
        return dx, dw, db, None, None, None, None


def refuse_second_gradients(
    kind: str = "simulated", instead: str = "train without mvue, fp8 and another input gradient"
) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated, where torch would take what
    it computes with for a constant. ``kind``: of its products."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{kind} products have no gradients of gradients (create_graph=True): {instead}"
        )


def backward_product(a: Tensor, b: Tensor, fp8: bool) -> Tensor:
    """``a @ b`` in the dtype of ``a``, with ``fp8`` of operands rounded to e5m2."""
    return _matmul_fp8(a, b, BACKWARD_FP8).to(a.dtype) if fp8 else a @ b


def _matmul_fp8(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    # FP8 numbers are bfloat16 numbers too: tensor cores multiply those exactly and sum in float32,
    # but round the sum for a 16-bit layer
    exact = torch.bfloat16 if a.is_cuda and a.dtype != torch.float32 else torch.float32
    (a, scale_a), (b, scale_b) = quantize(a, dtype, exact), quantize(b, dtype, exact)
    # meta has none
    autocast = (
        contextlib.nullcontext() if a.is_meta else torch.autocast(a.device.type, enabled=False)
    )
    with autocast:  # on, it would round the sums
        # one after the other: their product may overflow
        return (a @ b).float() / scale_a / scale_b


def estimate(tokens: Tensor, pattern: Pattern) -> Tensor:
    """The unbiased N:M estimate of a gradient (tokens, out) along the tokens, the last group filled
    up with zeros."""
    missing = -len(tokens) % pattern.m
    filled = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
    return masks.mvue(filled, pattern, 0)[: len(tokens)]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """A convolution (1, 2 or 3 dimensions) whose input gradient is computed with ``input_weight``,
    which gets no gradient itself. x: (batch, in, ...), weight and input_weight: (out, in /
    groups, kernel...), bias: (out) or None; stride, padding and dilation have one number a
    dimension. Under autocast all are cast as ``F.conv2d`` would."""
    return _Convolution.apply(
        *_autocast(x, weight, bias, input_weight),
        list(stride),
        list(padding),
        list(dilation),
        groups,
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_weight: Tensor,
        stride: list[int], padding: list[int], dilation: list[int], groups: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, input_weight)
        ctx.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        return torch.ops.aten.convolution(x, weight, bias, *ctx.geometry)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients()
        x, weight, input_weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if needs_x:
            output_mask = [True, False, False]
            dx = torch.ops.aten.convolution_backward(
                dz, x, input_weight, None, *ctx.geometry, output_mask
            )[0]
        if needs_w or needs_b:
            output_mask = [False, needs_w, needs_b]
            _, dw, db = torch.ops.aten.convolution_backward(
                dz, x, weight, [dz.shape[1]], *ctx.geometry, output_mask
            )
        return dx, dw, db, None, None, None, None, None


def _autocast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The tensors as autocast hands them to a matrix product."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return [x, *others]
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, *others)]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer computes in, given this input."""
    device = x.device.type
    return (
        torch.get_autocast_dtype(device)
        if not x.is_meta and torch.is_autocast_enabled(device)
        else x.dtype
    )
