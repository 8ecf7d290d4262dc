"""A dense linear layer for inference in int8 by oneDNN: what a packed one has to beat.

The weight is rounded as a packed one is, a scale a row. Tokens are quantised in the call, all of it
with one scale and one zero; a packed layer has them for each token. So a token's last bits depend on
the others of its call.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.onednn_copy import COPIES, OneDNNCopy
from nmrun.fast.cpu.packed_linear import check_operands
from nmrun.fast.operators import keep_dtypes, over_tokens

ENGINE = "onednn"
NARROW = 2.0**-6  # of a smaller range torch's steps are too wide: they are 6.1e-5 at least


def available() -> bool:
    """Whether torch has oneDNN's products of int8 here."""
    return ENGINE in torch.backends.quantized.supported_engines


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
        zeros = torch.zeros(rows, dtype=torch.long)
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
        return over_tokens(input, dense_int8, _product, self.values, self.scales, self.number)

    def dense(self) -> Tensor:
        """The weight as it was rounded, float32."""
        return self.values * self.scales[:, None]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _product(x: Tensor, weight: Tensor, scales: Tensor, number: int) -> Tensor:
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


@torch.library.custom_op("nmrun::dense_int8", mutates_args=())
def dense_int8(x: Tensor, weight: Tensor, scales: Tensor, number: int) -> Tensor:
    return _product(x.detach(), weight, scales, number)


@dense_int8.register_fake
def _(x, weight, scales, number):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    weight, scales = ctx.saved_tensors
    return dz @ (weight * scales[:, None]).to(dz.dtype), None, None, None


dense_int8.register_autograd(_backward, setup_context=_save)
