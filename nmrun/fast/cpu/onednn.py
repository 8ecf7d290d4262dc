"""Dense linear layers by oneDNN on CPUs where that is faster than what torch calls by itself.

In float32 ``F.linear`` is MKL's on x86, whatever the processor. oneDNN's product is torch's
operator ``mkldnn._linear_pointwise``, which code of ``torch.compile`` for CPUs calls. It reads
matrices by rows and by columns alike, so all three products of a training step are calls of it:

    Z = X W^T,    dX = dZ (W^T)^T,    dW = dZ^T (X^T)^T

In bfloat16 ``F.linear`` is oneDNN's, but reorders the weight in each call. In inference a copy in
oneDNN's own layout spares that.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.fast.cpu.onednn_copy import COPIES, OneDNNCopy
from nmrun.fast.cpu.packed_linear import check_operands
from nmrun.fast.measurement import FASTER, ONEDNN, Times
from nmrun.fast.operators import over_tokens
from nmrun.kernels.layout import has_memory, is_transformed
from nmrun.products.simulation import compute_dtype
from nmrun.sparsity.layers import is_plain_linear, of_one_input


def available() -> bool:
    """Whether torch has oneDNN's products here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def dtypes() -> set[torch.dtype]:
    """Of inputs and weights that oneDNN may multiply faster than torch's default here."""
    if not available():
        return set()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {torch.float32, torch.bfloat16}
    return {torch.float32}


def best_gradient(times: Mapping[str, Times]) -> str:
    """By which path a dense weight gradient is the faster."""
    candidate, torchs = times.get(ONEDNN), times["dense"].weight_gradient
    faster = (
        candidate is not None
        and not candidate.wrong
        and candidate.weight_gradient < FASTER * torchs
    )
    return ONEDNN if faster else "dense"


def weight_of(module: Any) -> Tensor | None:
    """The weight of a linear layer as (outputs, inputs); None for any other module, and for one
    with a ``forward`` of its own."""
    if "forward" in vars(module) or not is_plain_linear(module):
        return None
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def takes(module: nn.Module, x: Tensor) -> bool:
    """Whether a layer that is faster so computes this input so: in training, in float32, and not
    where ``torch.func`` follows, which has no rules for it."""
    in_training = bool(module.training) and not is_transformed()
    return in_training and x.numel() > 0 and compute_dtype(x) == torch.float32


def install(module: nn.Module) -> None:
    """Let a linear layer compute its products so in training."""
    stored = isinstance(module, nn.Linear)

    @of_one_input
    def forward(module: Any, input: Tensor) -> Tensor:
        if not takes(module, input):
            return type(module).forward(module, input)
        return linear(input, module.weight if stored else module.weight.t(), module.bias)

    module.forward = types.MethodType(forward, module)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``: x (..., inputs), weight (outputs, inputs), bias (outputs,) or None, float32."""
    z: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return z.view(*x.shape[:-1], len(weight))


class OneDNNLinear(OneDNNCopy, nn.Linear):
    """A dense linear layer for inference that oneDNN computes, in float32 or bfloat16. The weight
    (outputs, inputs) stays where it is; in bfloat16 there is a copy in oneDNN's layout beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        parameter = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", parameter)
        self.make_copy()

    def source(self) -> Tensor | None:
        """The weight in bfloat16, on a CPU whose oneDNN multiplies that."""
        weight, low = self.weight.detach(), torch.bfloat16
        taken = weight.dtype == low and low in dtypes() and weight.device.type == "cpu"
        return weight if taken and has_memory(weight) else None

    def copy(self, source: Tensor) -> tuple[Tensor, Any]:
        """The weight in oneDNN's layout, and which weight that is."""
        return _reordered(source)

    def _apply(self, *args: Any, **kwargs: Any) -> OneDNNLinear:
        super()._apply(*args, **kwargs)
        self.renew()
        return self

    def forward(self, input: Tensor) -> Tensor:
        """From (..., inputs) to (..., outputs)."""
        dtype = compute_dtype(input)
        if input.numel() and dtype == torch.float32:
            return linear(input, self.weight, self.bias)
        if input.numel() and dtype == torch.bfloat16 and COPIES[self.number] is not None:
            operands = self.weight, self.bias, self.number
            return over_tokens(input, onednn_linear, _product_of_copy, *operands)
        return super().forward(input)


class Bf16OneDNNLinear(OneDNNLinear):
    """The same with inputs, weight and bias rounded to bfloat16. Outputs are in the dtype of the input."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.bfloat16(), None if bias is None else bias.bfloat16())

    def forward(self, input: Tensor) -> Tensor:
        """From (..., inputs) to (..., outputs)."""
        return super().forward(input.bfloat16()).to(compute_dtype(input))


def _reordered(weight: Tensor) -> tuple[Tensor, Any]:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), _state(weight)


def _state(weight: Tensor) -> tuple[int | None, int]:
    """What changes when a weight is written, or lies elsewhere."""
    return None if weight.is_inference() else weight._version, weight.data_ptr()


def _product_of_copy(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    check_operands(x, weight, weight.shape[1])
    copy, copied = COPIES[number]
    if copied != _state(weight):  # written in place since
        COPIES[number] = copy, _ = _reordered(weight)
    product = torch.ops.mkldnn._linear_pointwise
    result: Tensor = product(x.contiguous(), copy, bias, "none", [], "")
    return result


@torch.library.custom_op("nmrun::onednn_linear", mutates_args=())
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    return _product_of_copy(x.detach(), weight, bias, number)


@onednn_linear.register_fake
def _(x, weight, bias, number):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])


onednn_linear.register_autograd(
    lambda ctx, dz: (dz @ ctx.saved_tensors[0], None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


class _Product(torch.autograd.Function):
    """``a b^T + bias``, a (m, k), b (n, k), bias (n,); gradients of gradients are such products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return product(a, b, bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), (needs_a, needs_b, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _Product.apply(d, b.t(), None) if needs_a else None,
            _Product.apply(d.t(), a.t(), None) if needs_b else None,
            d.sum(0) if needs_bias else None,
        )


@torch.library.custom_op("nmrun::product_onednn", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a b^T + bias``, (m, n), with a (m, k) and b (n, k), by rows or by columns."""
    # slices of columns are slow, and gradients may come expanded
    a, b = (t if t.is_contiguous() or t.t().is_contiguous() else t.contiguous() for t in (a, b))
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result


@product.register_fake
def _(a, b, bias=None):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[0])
