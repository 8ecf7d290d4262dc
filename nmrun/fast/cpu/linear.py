"""A linear layer through N:M products on the CPU, as operators that autograd and ``torch.compile``
know.

:class:`LinearProducts` holds what the products read (``nmrun.fast.cpu.kernels.products``), packed once per
optimizer step. It is no part of any state dict.

    Z = X W^T       sparse
    dX = dZ V       sparse: V^T is packed too, and needs no pattern; V is W unless the recipe has
                    another
    dW = dZ^T X     dense, by torch or by oneDNN; the kept entries alone where the recipe masks the
                    gradients of pruned weights; with MVUE E^T X with the N:M estimate E of dZ,
                    sparse
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nmrun.fast.cpu import onednn
from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.measurement import ONEDNN
from nmrun.patterns import Pattern
from nmrun.products.simulated import estimate

KINDS, PARTS = ("forward", "backward"), ("values", "index", "start")


class LinearProducts(nn.Module):
    """The packed weight of one layer, in buffers that keep their addresses; empty until
    :meth:`write`.

    Args:
        shape: (outputs, inputs).
        dtype: of the products, float32 or bfloat16; values and sums are float32.
        pattern: of the weight, along its inputs.
        gradient_is_faster: the sparse ways to compute the weight gradient beat the dense one.
        dense: by what the dense one is computed, ``dense`` for torch or ``onednn``.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        pattern: Pattern,
        gradient_is_faster: bool = False,
        dense: str = "dense",
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.pattern = shape, dtype, pattern
        self.gradient_is_faster, self.dense, self.gradient = gradient_is_faster, dense, dense
        rows, columns = shape
        whole, rest = divmod(columns, pattern.m)
        self.full = rows * (whole * pattern.n + min(rest, pattern.n))  # where no kept weight is 0
        # the weight of the input gradient may be N:M along the outputs instead
        room = max(self.full, columns * -(-rows // pattern.m) * pattern.n)
        for kind, sides in (("forward", (rows, columns)), ("backward", (columns, rows))):
            empty = PackedMatrix.empty(sides[0], sides[1], room)
            for part in PARTS:
                self.register_buffer(f"{kind}_{part}", getattr(empty, part), persistent=False)

    @torch.no_grad()
    def write(self, weight: Tensor, other: Tensor | None, masked: bool = False) -> None:
        """Pack a weight (outputs, inputs), float32, in place of the old one.

        Args:
            weight: of the forward product.
            other: of the input gradient, where that is not ``weight``.
            masked: the gradients of pruned weights are not needed. Kept weights that are 0 need
                theirs, so where there are any, all are computed.
        """
        forward, backward = self._matrix("forward"), self._matrix("backward")
        if other is not None:
            products.pack(other.detach().t().contiguous(), backward)
            products.pack(weight.detach().contiguous(), forward)
        elif weight.is_contiguous():
            products.pack(weight.detach(), forward, backward)
        else:  # stored as (inputs, outputs)
            products.pack(weight.detach().t().contiguous(), backward, forward)
        sampled = masked and self.gradient_is_faster and forward.count == self.full
        self.gradient = "sampled" if sampled else self.dense

    def _matrix(self, kind: str) -> PackedMatrix:
        rows, columns = self.shape if kind == "forward" else reversed(self.shape)
        return PackedMatrix.of([getattr(self, f"{kind}_{part}") for part in PARTS], rows, columns)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mvue: Pattern | None = None
    ) -> Tensor:
        """x (..., inputs) to (..., outputs). ``weight`` is not read: it receives the gradient."""
        x = x.to(self.dtype)
        gradient = self.gradient
        if mvue is not None:
            gradient = f"{'sparse' if self.gradient_is_faster else 'dense'} {mvue}"
        z = linear(
            *(x.reshape(-1, x.shape[-1]), weight, bias),
            *([getattr(self, f"{kind}_{part}") for part in PARTS] for kind in KINDS),
            gradient,
        )
        return z.view(*x.shape[:-1], z.shape[-1])


@torch.library.custom_op("nmrun::linear_cpu", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, forward: list[Tensor], backward: list[Tensor],
    gradient: str,
) -> Tensor:  # fmt: skip
    """``x W^T + bias``, (tokens, outputs); ``gradient`` is how dW is computed: ``dense``,
    ``onednn``, ``sampled``, or ``dense N:M`` and ``sparse N:M`` of an estimate."""
    return products.multiply(x, PackedMatrix.of(forward, weight.shape[0], weight.shape[1]), bias)


@linear.register_fake
def _(x, weight, bias, forward, backward, gradient):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("nmrun::multiply_cpu", mutates_args=())
def multiply(x: Tensor, parts: list[Tensor], rows: int) -> Tensor:
    """x S^T, (tokens, rows)."""
    return products.multiply(x, PackedMatrix.of(parts, rows, x.shape[1]))


@multiply.register_fake
def _(x, parts, rows):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], rows)


@torch.library.custom_op("nmrun::sampled_cpu", mutates_args=())
def sampled(dz: Tensor, x: Tensor, kept: list[Tensor]) -> Tensor:
    """``dz^T x`` at the entries of a packed (outputs, inputs) matrix, zero elsewhere; float32."""
    return products.sampled(x, dz, PackedMatrix.of(kept, dz.shape[1], x.shape[1]))


@sampled.register_fake
def _(dz, x, kept):  # type: ignore[no-untyped-def]
    return x.new_empty(dz.shape[1], x.shape[1], dtype=torch.float32)


@torch.library.custom_op("nmrun::estimated_cpu", mutates_args=())
def estimated_product(estimated: Tensor, x: Tensor, groups: int) -> Tensor:
    """``E^T x`` with an estimate E (tokens, outputs) that has at most ``groups`` non-zeros in a
    column; float32."""
    rows = estimated.float().t().contiguous()
    packed = PackedMatrix.empty(len(rows), rows.shape[1], len(rows) * groups)
    products.pack(rows, packed)
    return products.multiply(x.float(), packed, turned=True)


@estimated_product.register_fake
def _(estimated, x, groups):  # type: ignore[no-untyped-def]
    return x.new_empty(estimated.shape[1], x.shape[1], dtype=torch.float32)


def weight_gradient(dz: Tensor, x: Tensor, forward: list[Tensor], gradient: str) -> Tensor:
    """dW (outputs, inputs) as ``gradient`` of :func:`linear` says."""
    if gradient == "sampled":
        return sampled(dz, x, forward)
    if gradient == ONEDNN:
        return onednn.product(dz.t(), x.t())
    how, _, pattern = gradient.partition(" ")
    if pattern:
        mvue = Pattern.parse(pattern)
        dz = estimate(dz, mvue, None)
        if how == "sparse":
            return estimated_product(dz, x, -(-len(x) // mvue.m) * mvue.n)
    return dz.t() @ x


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, forward, backward, ctx.gradient = inputs
    ctx.save_for_backward(x, *forward, *backward)
    ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    x, *parts = ctx.saved_tensors
    forward, backward = parts[:3], parts[3:]
    weight_dtype, bias_dtype = ctx.dtypes
    dx = dw = db = None
    dz = dz.contiguous()  # a gradient may come expanded
    if ctx.needs_input_grad[0]:
        dx = multiply(dz, backward, x.shape[1])
    if ctx.needs_input_grad[1]:
        dw = weight_gradient(dz, x, forward, ctx.gradient).to(weight_dtype)
    if ctx.needs_input_grad[2]:
        db = dz.sum(0).to(bias_dtype)
    return dx, dw, db, [None] * 3, [None] * 3, None


linear.register_autograd(_backward, setup_context=_save)
