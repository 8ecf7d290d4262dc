"""How a layer with a packed weight calls its product, and what compilers and autograd know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.kernels.layout import has_memory, is_forward_mode
from nmrun.products.simulation import compute_dtype, refuse_second_gradients

Maker = Callable[[Callable[..., Any]], Any]  # of an operator from a function
# for refuse_second_gradients
PACKED = ("packed", 'nmrun.accelerate(handle, sample, "off") takes them back')


def operator(name: str, empty: Callable[..., Any]) -> Maker:
    """Make a function an operator that compilers and autograd know by its ``name``, and its result by
    an ``empty`` one of the same operands."""

    def made(function: Callable[..., Any]) -> Any:
        operation = torch.library.custom_op(f"nmrun::{name}", function, mutates_args=())
        operation.register_fake(empty)
        return operation

    return made


def inference(name: str, empty: Callable[..., Any], input_gradient: Callable[..., Tensor]) -> Maker:
    """The same of a product for inference, whose operands are x, the ``parts`` of its weight, and others.
    A gradient reaches x alone: ``input_gradient(dz, x's shape, parts, *others)``, where a tensor among the
    others is None."""

    def made(function: Callable[..., Tensor]) -> Any:
        operation = operator(name, empty)(function)

        def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            x, parts, *others = inputs
            ctx.save_for_backward(*parts)
            ctx.size, ctx.others = x.shape, [None if isinstance(o, Tensor) else o for o in others]

        def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
            parts = list(ctx.saved_tensors)
            dx = input_gradient(dz, ctx.size, parts, *ctx.others)
            return dx, [None] * len(parts), *[None] * len(ctx.others)

        operation.register_autograd(backward, setup_context=save)
        return operation

    return made


def training(
    name: str,
    empty: Callable[..., Any],
    input_gradient: Callable[..., Tensor],
    weight_gradient: Callable[..., Tensor],
) -> Maker:
    """The same of a linear layer in training, whose operands are x (tokens, inputs), weight, bias, what
    the forward product reads, what the input gradient reads, and others. The gradients are
    ``input_gradient(dz, x, what it reads, *others)`` and
    ``weight_gradient(dz, x, what the forward product reads, *others)``."""

    def made(function: Callable[..., Tensor]) -> Any:
        operation = operator(name, empty)(function)

        def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            x, weight, bias, forward, back, *ctx.others = inputs
            ctx.save_for_backward(x, *forward, *back)
            ctx.split, ctx.dtypes = (
                len(forward),
                [t if t is None else t.dtype for t in (weight, bias)],
            )

        def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
            refuse_second_gradients(*PACKED)
            x, *parts = ctx.saved_tensors
            forward, back = parts[: ctx.split], parts[ctx.split :]
            needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
            dx = dw = db = None
            dz = dz.contiguous()  # a gradient may come expanded
            if needs_x:
                dx = input_gradient(dz, x, back, *ctx.others)
            if needs_weight:
                dw = weight_gradient(dz, x, forward, *ctx.others)
                # autograd would copy what is not stored as the weight is
                dw = dw.to(ctx.dtypes[0], memory_format=torch.contiguous_format)
            if needs_bias:
                db = dz.sum(0).to(ctx.dtypes[1])
            nothing = [None] * len(forward), [None] * len(back), *[None] * len(ctx.others)
            return dx, dw, db, *nothing

        operation.register_autograd(backward, setup_context=save)
        return operation

    return made


def followed(
    x: Tensor, operator: Callable[..., Tensor], product: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """``operator`` where a compiler, a tracer or autograd follows x, which know it; else ``product``
    itself, which is faster. Raises RuntimeError in forward mode, whose derivatives would be 0."""
    differentiated = x.requires_grad and torch.is_grad_enabled()
    if has_memory(x) and not differentiated:
        return product
    if is_forward_mode():
        raise RuntimeError(
            "packed layers have no derivatives in forward mode: take backward(), or the dense model"
        )
    return operator


def over_tokens(
    x: Tensor, operator: Callable[..., Tensor], product: Callable[..., Tensor], *operands: Any
) -> Tensor:
    """A product of tokens (tokens, in_features) for x (..., in_features), in the dtype that autocast
    computes in, as :func:`followed` chooses."""
    x = x.to(compute_dtype(x))
    call = followed(x, operator, product)
    if x.dim() == 2:
        return call(x, *operands)
    out = call(x.reshape(-1, x.shape[-1]), *operands)
    return out.view(*x.shape[:-1], out.shape[-1])


def keep_dtypes(layer: nn.Module, names: Iterable[str], apply: Callable[[], object]) -> None:
    """Let ``apply`` move and cast a layer, but no more than move these buffers, whose bytes would
    mean something else in another dtype."""
    kept = {name: getattr(layer, name) for name in names}
    apply()
    for name, before in kept.items():
        if (now := getattr(layer, name)).dtype != before.dtype:
            layer.register_buffer(name, before.to(now.device))
