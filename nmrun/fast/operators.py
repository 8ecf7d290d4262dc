"""How a layer with a packed weight calls its product, and what compilers and autograd know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nmrun.products.simulation import compute_dtype


def followed(
    x: Tensor, operator: Callable[..., Tensor], product: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """``operator`` where a compiler or autograd follows x, which know it; else ``product`` itself,
    which is faster."""
    differentiated = x.requires_grad and torch.is_grad_enabled()
    return operator if torch.compiler.is_compiling() or differentiated else product


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


def register_operator(operator: Any, unpacked: Callable[..., Tensor], count: int) -> None:
    """Let compilers and autograd know an operator ``(x, *parts, bias, rows, columns, ...)`` whose result
    is (tokens, rows): the gradient of x goes through ``unpacked(*parts, rows, columns)``, the weight
    with its zeros. There are ``count`` parts."""

    @operator.register_fake
    def _(x: Tensor, *operands: Any) -> Tensor:
        return x.new_empty(x.shape[0], operands[count + 1])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *parts = inputs[: count + 1]
        ctx.save_for_backward(*parts)
        ctx.shape, ctx.others = inputs[count + 2 : count + 4], [None] * (len(inputs) - 1)

    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        dense = unpacked(*ctx.saved_tensors, *ctx.shape)
        return dz @ dense.to(dz.dtype), *ctx.others

    operator.register_autograd(backward, setup_context=save)
