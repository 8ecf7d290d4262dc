"""Dense linear layers by oneDNN on CPUs where that is faster than what torch calls by itself.

In float32 ``F.linear`` is MKL's on x86, whatever the processor. oneDNN's product is torch's
operator ``mkldnn._linear_pointwise``, which code of ``torch.compile`` for CPUs calls. It reads
matrices by rows and by columns alike, so all three products of a training step are calls of it:

    Z = X W^T,    dX = dZ (W^T)^T,    dW = dZ^T (X^T)^T

In bfloat16 ``F.linear`` is oneDNN's, but reorders the weight in each call. In inference a copy in
oneDNN's own layout spares that.

In int8, for inference alone, a dense layer is what a packed one has to beat. The weight is rounded as
a packed one is, a scale a row. Tokens are quantised in the call, all of it with one scale and one zero;
a packed layer has them for each token. So a token's last bits depend on the others of its call.
"""

from __future__ import annotations

import itertools
import math
import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.packed_linear import check_operands
from nmrun.fast.measurement import FASTER, ONEDNN, Times
from nmrun.fast.operators import inference, keep_dtypes, operator, over_tokens
from nmrun.kernels.layout import has_memory, is_transformed
from nmrun.products.simulation import compute_dtype
from nmrun.sparsity.layers import is_plain_linear, of_one_input

ENGINE = "onednn"  # torch's name of it among the engines of int8
NARROW = 2.0**-6  # of a smaller range torch's steps of int8 are too wide: they are 6.1e-5 at least


def available() -> bool:
    """Whether torch has oneDNN's products here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def available_int8() -> bool:
    """The same of int8."""
    return ENGINE in torch.backends.quantized.supported_engines


def dtypes() -> set[torch.dtype]:
    """Of inputs and weights that oneDNN may multiply faster than torch's default here."""
    if not available():
        return set()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {torch.float32, torch.bfloat16}
    return {torch.float32}


def best_gradient(times: Mapping[str, Times]) -> str:
    """By which path a dense weight gradient is the faster."""
    candidate, torchs = times.get(ONEDNN, Times(wrong="not tried")), times["dense"]
    faster = candidate.weight_gradient < FASTER * torchs.weight_gradient
    return ONEDNN if faster and not candidate.wrong else "dense"


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
    give_forward(module, linear, takes)


def give_forward(
    module: nn.Module,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    when: Callable[[nn.Module, Tensor], bool],
) -> None:
    """Let ``nn.Linear`` or Hugging Face's ``Conv1D`` compute a product of x (..., inputs), its weight
    (outputs, inputs) and bias for those inputs, and for all others what it did before."""
    before = vars(module).get("forward")
    original: Callable[..., Tensor] = type(module).forward if before is None else before.__func__
    stored = isinstance(module, nn.Linear)

    @of_one_input
    def forward(module: Any, input: Tensor) -> Tensor:
        if not when(module, input):
            return original(module, input)
        return product(input, module.weight if stored else module.weight.t(), module.bias)

    module.forward = types.MethodType(forward, module)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``: x (..., inputs), weight (outputs, inputs), bias (outputs,) or None, float32."""
    z: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return z.view(*x.shape[:-1], len(weight))


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


@operator("product_onednn", lambda a, b, bias=None: a.new_empty(a.shape[0], b.shape[0]))
def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a b^T + bias``, (m, n), with a (m, k) and b (n, k), by rows or by columns."""
    # slices of columns are slow, and gradients may come expanded
    a, b = (t if t.is_contiguous() or t.t().is_contiguous() else t.contiguous() for t in (a, b))
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result


# --- layers for inference with a copy of the weight ----------------------------------------------

# by number: a compiled graph cannot hold a copy, but name it
COPIES: dict[int, Any] = {}
_numbers = itertools.count()


class OneDNNCopy(nn.Module):
    """A layer for inference whose product reads ``COPIES[layer.number]``, where there is one. The copy
    goes when the layer does, and is made anew for pickles, copies and state dicts."""

    number: int

    def make_copy(self) -> None:
        """Make the copy."""
        self.number = next(_numbers)
        weakref.finalize(self, COPIES.pop, self.number, None)
        self.renew()

    def renew(self) -> None:
        """Make it anew, under the same number."""
        source = self.source()
        COPIES[self.number] = None if source is None else self.copy(source)

    def source(self) -> Tensor | None:
        """The tensor that is copied, None where the product reads it as it is."""
        raise NotImplementedError

    def copy(self, source: Tensor) -> Any:
        """The source as oneDNN's product reads it."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:  # of pickles and copies
        super().__setstate__(state)
        self.make_copy()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.renew()


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
            operands = [self.weight], self.bias, self.number
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


def _product_of_copy(x: Tensor, parts: list[Tensor], bias: Tensor | None, number: int) -> Tensor:
    (weight,) = parts
    check_operands(x, weight, weight.shape[1])
    copy, copied = COPIES[number]
    if copied != _state(weight):  # written in place since
        COPIES[number] = copy, _ = _reordered(weight)
    product = torch.ops.mkldnn._linear_pointwise
    result: Tensor = product(x.contiguous(), copy, bias, "none", [], "")
    return result


onednn_linear = inference(
    "onednn_linear",
    lambda x, parts, bias, number: x.new_empty(x.shape[0], parts[0].shape[0]),
    lambda dz, size, parts, *others: dz @ parts[0],
)(_product_of_copy)


class DenseInt8Linear(OneDNNCopy):
    """``x W^T + bias`` with a weight of int8, on the CPU.

    Args:
        values: (out_features, in_features), int8.
        scales: (out_features,), float32, that its rows are multiplied with.
        bias: (out_features,), or None.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.make_copy()

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> DenseInt8Linear:
        """The layer of a weight (out_features, in_features), rounded to int8.

        Raises:
            ValueError: for a weight with NaN or infinity.
        """
        return cls(*int8.rounded(weight.detach()), bias)

    def source(self) -> Tensor:
        """The rounded weight."""
        return self.values

    def copy(self, source: Tensor) -> Any:
        """The weight and the bias as torch's operator takes them."""
        bias, rows = self.bias, self.out_features
        zeros = torch.zeros(rows, dtype=torch.long, device="cpu")
        quantised = torch._make_per_channel_quantized_tensor(source, self.scales.double(), zeros, 0)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = ENGINE
        try:
            return torch.ops.quantized.linear_prepack(
                quantised, None if bias is None else bias.float()
            )
        finally:
            torch.backends.quantized.engine = before

    def _apply(self, *args: Any, **kwargs: Any) -> DenseInt8Linear:
        keep_dtypes(self, ("scales",), partial(super()._apply, *args, **kwargs))
        return self

    def forward(self, input: Tensor) -> Tensor:
        """From (..., in_features) to (..., out_features), in the dtype of the input.

        Raises:
            RuntimeError: for NaN and infinity in the input.
        """
        return over_tokens(
            input, dense_int8, _int8_product, [self.values, self.scales], self.number
        )

    def dense(self) -> Tensor:
        """The weight as it was rounded, float32."""
        return self.values * self.scales[:, None]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _int8_product(x: Tensor, parts: list[Tensor], number: int) -> Tensor:
    weight, _ = parts
    check_operands(x, weight, weight.shape[1])
    if not x.numel():
        return x.new_empty(len(x), len(weight))
    low, high = map(float, torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise RuntimeError("int8 products: the activations have NaN or infinity")
    product, copy = torch.ops.quantized.linear_dynamic, COPIES[number]
    tokens = x.float().contiguous()
    size = max(high, 0.0) - min(low, 0.0)
    if not 0 < size < NARROW:
        result: Tensor = product(tokens, copy)
    else:  # a power of two makes the range wide enough, and changes no rounding
        up = 2.0 ** min(126, math.ceil(math.log2(NARROW / size)))
        _, bias = torch.ops.quantized.linear_unpack(copy)
        bias = 0.0 if bias is None else bias
        result = (product(tokens * up, copy) - bias) / up + bias
    return result.to(x.dtype)


dense_int8 = inference(
    "dense_int8",
    lambda x, parts, number: x.new_empty(x.shape[0], parts[0].shape[0]),
    lambda dz, size, parts, number: dz @ (parts[0] * parts[1][:, None]).to(dz.dtype),
)(_int8_product)
