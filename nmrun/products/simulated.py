"""How the three matrix products of a sparse layer are computed in training.

For a linear layer with input X (tokens, in), output Z (tokens, out) and projected weight W (out, in) they are

    Z = X W^T          the forward product, which sums over the inputs
    dX = dZ W          the input gradient, over the outputs
    dW = dZ^T X        the weight gradient, over the tokens

Hardware for N:M sparsity wants one operand to be N:M along the dimension that is summed over. The projection does that for Z. For dX
a recipe can give another weight, N:M along the outputs (Bi-Mask, arXiv 2302.06058). For dW, dZ is replaced by its minimum-variance
unbiased N:M estimate along the tokens, and all three products can be rounded to FP8 (S-STE: Hu et al. 2024, arXiv 2409.09099).
Everything here is simulated: the numbers are those of such hardware, the products are dense.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.sparsity import estimators
from nmrun.sparsity.apply import keep_largest
from nmrun.sparsity.weight import SparseWeight

if TYPE_CHECKING:
    from nmrun.products.linear24 import Packed

FORWARD_FP8, BACKWARD_FP8 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in an FP8 ``dtype`` with one scale for the whole tensor: ``x`` is about ``values / scale``.

    The scale maps the largest magnitude to the largest number of the format, from this tensor alone (just-in-time scaling). Returns
    the values (FP8) and the scale (float32, 0-dimensional; 1 for an all-zero tensor). What is not finite becomes NaN.
    """
    x = x.float()
    largest = x.abs().amax()
    scale = (torch.finfo(dtype).max / largest).clamp_max(torch.finfo(torch.float32).max)  # finite for subnormal numbers too
    scale = torch.where(largest == 0, 1.0, scale)
    return (x * scale).to(dtype), scale


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    input_weight: Tensor | None = None,
    mvue: Pattern | None = None,
    fp8: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``torch.nn.functional.linear`` with other backward products; without any of the options, the same.

    x: (..., in), weight: (out, in), bias: (out) or None; returns (..., out). Under autocast all are cast as ``F.linear`` would.
    input_weight: (out, in), the weight of the input gradient ``dX = dZ input_weight``; it gets no gradient itself. None: ``weight``.
    mvue: the weight gradient is ``E^T X``, E the unbiased estimate of dZ with at most N non-zeros in each M consecutive tokens
    (:func:`nmrun.sparsity.mvue`); tokens are all leading dimensions of x, in order, the last group filled up with zeros. Random
    numbers come from ``generator``, by default torch's global one for the device.
    fp8: both operands of the forward product are rounded to e4m3fn, those of the backward products to e5m2 (after the estimate), see
    :func:`quantize`; products are summed in float32. The bias and its gradient stay exact.
    """
    if x.numel() == 0:  # an expert without tokens: there is no largest magnitude, and no gradient to estimate
        return F.linear(x, weight, bias)
    return _Linear.apply(*_autocast(x, weight, bias, input_weight), mvue, fp8, generator)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_weight: Tensor | None,
        mvue: Pattern | None, fp8: bool, generator: torch.Generator | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight if input_weight is None else input_weight)
        ctx.mvue, ctx.fp8, ctx.generator = mvue, fp8, generator
        if not fp8:
            return F.linear(x, weight, bias)
        z = _matmul_fp8(x, weight.t(), FORWARD_FP8)
        z = z if bias is None else z + bias
        return z if z.dtype == x.dtype else z.to(x.dtype)  # torch.compile loses the gradient of a cast that does nothing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = backward_product(dz, weight, ctx.fp8)
        tokens = dz.reshape(-1, dz.shape[-1])
        if ctx.needs_input_grad[2]:
            db = tokens.sum(0)
        if ctx.needs_input_grad[1]:
            if ctx.mvue is not None:
                tokens = estimate(tokens, ctx.mvue, ctx.generator)
            dw = backward_product(tokens.t(), x.reshape(-1, x.shape[-1]), ctx.fp8)
        return dx, dw, db, None, None, None, None


def backward_product(a: Tensor, b: Tensor, fp8: bool) -> Tensor:
    """``a @ b`` in the dtype of ``a``, with ``fp8`` of operands rounded to e5m2."""
    return _matmul_fp8(a, b, BACKWARD_FP8).to(a.dtype) if fp8 else a @ b


def _matmul_fp8(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    # FP8 numbers are bfloat16 numbers too: tensor cores multiply those exactly and sum in float32, but round the sum for a 16-bit layer
    exact = torch.bfloat16 if a.is_cuda and a.dtype != torch.float32 else torch.float32
    (a, scale_a), (b, scale_b) = quantize(a, dtype), quantize(b, dtype)
    autocast = contextlib.nullcontext() if a.is_meta else torch.autocast(a.device.type, enabled=False)  # meta has none
    with autocast:  # on, it would round the sums
        return (a.to(exact) @ b.to(exact)).float() / scale_a / scale_b  # one after the other: their product may overflow


def estimate(tokens: Tensor, pattern: Pattern, generator: torch.Generator | None) -> Tensor:
    """The unbiased N:M estimate of a gradient (tokens, out) along the tokens, the last group filled up with zeros."""
    missing = -len(tokens) % pattern.m
    filled = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
    return estimators.mvue(filled, pattern, 0, generator)[: len(tokens)]


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
    """A convolution (1, 2 or 3 dimensions) whose input gradient is computed with ``input_weight`` instead of ``weight``.

    x: (batch, in, ...), weight and input_weight: (out, in / groups, kernel...), bias: (out) or None; stride, padding and dilation have one
    number a dimension. Under autocast all are cast as ``F.conv2d`` would. ``input_weight`` gets no gradient itself.
    """
    return _Convolution.apply(*_autocast(x, weight, bias, input_weight), list(stride), list(padding), list(dilation), groups)


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
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, input_weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if needs_x:
            wanted = [True, False, False]
            dx = torch.ops.aten.convolution_backward(dz, x, input_weight, None, *ctx.geometry, wanted)[0]
        if needs_w or needs_b:
            wanted = [False, needs_w, needs_b]
            _, dw, db = torch.ops.aten.convolution_backward(dz, x, weight, [dz.shape[1]], *ctx.geometry, wanted)
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
    return torch.get_autocast_dtype(device) if not x.is_meta and torch.is_autocast_enabled(device) else x.dtype


# --- on a layer ----------------------------------------------------------------------------------


class Layer:
    """How one layer computes its products: what its own ``forward`` does not know.

    Like dropout, it acts in training mode alone, and not in a dense phase of the recipe. A deep
    copy of the module computes as if it were not there.

    Attributes:
        weight: the layer's sparse weight.
        mvue, fp8: see :func:`linear`.
        input_weight: the weight of the input gradient, stored as the weight, or None.
        packed: what 2:4 products read, or None; ``uses_packed``: it is up to date.
        active: the recipe's forward weights are not the dense ones.
    """

    def __init__(self, weight: SparseWeight) -> None:
        self.weight, self.module = weight, weight.module
        self.mvue: Pattern | None = None
        self.fp8 = False
        self.input_weight: Tensor | None = None
        self.packed: Packed | None = None
        self.uses_packed = False
        self.active = False

    def matrix(self, stored: Any) -> Any:
        """A linear layer's weight, or None, as (outputs, inputs), however the layer stores it."""
        return stored if stored is None or self.weight.dim == 1 else stored.t()

    def is_on(self, module: Any) -> bool:
        """Whether this pass of ``module`` is computed here."""
        return self.active and module is self.module and bool(module.training)

    def is_behind(self) -> bool:
        """Whether the weight was written since what depends on it was: until the next step.

        Compiled code does not ask.
        """
        return not torch.compiler.is_compiling() and self.weight.moved()

    def keep_input_weight(self) -> Tensor:
        """The memory of :attr:`input_weight`, made where the weight is."""
        like, own = self.weight.weight, self.input_weight
        if own is None or own.device != like.device or own.dtype != like.dtype:
            own = self.input_weight = torch.zeros_like(like)
        return own

    def prune_again(self, weight: SparseWeight) -> None:
        """Double pruning: write the projected weight, N:M along the outputs too, for the input
        gradient."""
        keep_largest(weight.weight, self.keep_input_weight(), weight.pattern, weight.outputs)

    def pack(self, weight: SparseWeight) -> None:
        """Pack what 2:4 products read."""
        if self.packed is not None and self.uses_packed:
            self.packed.write(*map(self.matrix, (weight.weight, self.input_weight)))


def install(
    weights: Sequence[SparseWeight], mvue: Pattern | None = None, fp8: bool = False
) -> list[str]:
    """Let the layers of sparse weights compute their products by a :class:`Layer`.

    ``mvue`` and ``fp8`` are as in :func:`linear`, for linear layers only (Hugging Face's ``Conv1D``
    is one). Left alone are the projections of ``nn.MultiheadAttention``, and layers with a
    ``forward`` of their own. Code that reads ``layer.weight`` without calling the layer goes past
    this. Works under ``torch.compile(fullgraph=True)``; gradients of gradients raise.

    Returns:
        The names of the weights that are left alone.
    """
    left_alone = []
    for weight in weights:
        layer = weight.layer or Layer(weight)
        forward = _forward_of(weight, layer, mvue, fp8)
        if forward is None:
            left_alone.append(weight.name)
            continue
        layer.mvue, layer.fp8 = mvue, fp8
        weight.layer = layer
        weight.module.forward = types.MethodType(forward, weight.module)
    return left_alone


def prune_again(weights: Sequence[SparseWeight], recipe: str, has_own: bool) -> list[str]:
    """Double pruning: an ``input_weight`` for every layer, N:M along the outputs as well.

    Args:
        weights: all sparse weights.
        recipe: its name, for the message.
        has_own: whether it sees to the input gradient itself.

    Returns:
        The names of layers that cannot have one: grouped convolutions, outputs that M does not
        divide, and what :func:`install` leaves alone.

    Raises:
        ConfigError: for a recipe that has its own, and where no layer can have one.
    """
    if has_own:
        raise ConfigError(
            f"{recipe} makes the input gradient N:M by itself: double pruning is for other recipes"
        )
    left_alone = []
    for weight in weights:
        grouped = getattr(weight.module, "groups", 1) > 1
        if grouped or weight.shape[weight.outputs] % weight.pattern.m or not ensured(weight):
            left_alone.append(weight.name)
        else:
            weight.dependents.append(weight.layer.prune_again)
            weight.layer.keep_input_weight()
    if len(left_alone) == len(weights):
        raise ConfigError("double pruning needs a layer whose number of outputs is a multiple of M")
    return left_alone


def replaceable(weight: SparseWeight) -> bool:
    """Whether :func:`install` can do anything for this layer."""
    return _forward_of(weight, Layer(weight), None, False) is not None


def ensured(weight: SparseWeight) -> bool:
    """Whether the layer's products are computed here: from now on at the latest, if they can be."""
    return weight.layer is not None or not install([weight])


def uninstall(weight: SparseWeight) -> None:
    """Take back what :func:`install` did, if it did anything."""
    if weight.layer is not None:
        vars(weight.module).pop("forward", None)
        weight.layer, weight.dependents = None, []


def _is_ours(forward: Any) -> bool:
    return getattr(forward, "__module__", None) == __name__


def _forward_of(
    weight: SparseWeight, layer: Layer, mvue: Pattern | None, fp8: bool
) -> Callable[..., Tensor] | None:
    module, attribute = weight.module, weight.attribute
    current = vars(module).get("forward")
    if attribute != "weight" or (current is not None and not _is_ours(current)):
        return None
    # MultiheadAttention.out_proj, which nobody calls
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    # subclasses may do something else
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if owner is nn.Linear or owner.__name__ == "Conv1D":
        return _linear_forward(layer, mvue, fp8)
    if owner in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and mvue is None and not fp8:
        return _convolution_forward(layer)
    return None


def _linear_forward(layer: Layer, mvue: Pattern | None, fp8: bool) -> Callable[..., Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        if not layer.is_on(module):
            return type(module).forward(module, x)
        weight, packed, other = layer.matrix(module.weight), layer.packed, layer.matrix(layer.input_weight)
        if layer.is_behind():
            packed = other = None
        if packed is not None and layer.uses_packed and compute_dtype(x) == packed.dtype and x.numel():
            return packed(x, weight, module.bias, mvue)
        return linear(x, weight, module.bias, other, mvue, fp8)

    return forward


def _convolution_forward(layer: Layer) -> Callable[..., Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        input_weight = layer.input_weight
        if input_weight is None or not layer.is_on(module) or layer.is_behind():
            return type(module).forward(module, x)
        padding = module.padding
        if module.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode), [0] * len(module.stride)
        batch = x if x.dim() == input_weight.dim() else x.unsqueeze(0)
        geometry = (module.stride, padding, module.dilation, module.groups)
        z = convolution(batch, module.weight, module.bias, input_weight, *geometry)
        return z if batch is x else z.squeeze(0)

    return forward
