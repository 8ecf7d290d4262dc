"""How a layer with a packed weight calls its product, and what compilers and autograd know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.kernels.layout import has_memory
from nmrun.products.simulation import compute_dtype

# for refuse_second_gradients
PACKED = ("packed", 'nmrun.accelerate(handle, sample, "off") takes them back')


def operator(name: str, empty: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator that compilers and autograd know by its ``name``, and its result by
    an ``empty`` one of the same operands."""

    def made(function: Callable[..., Any]) -> Any:
        operation = torch.library.custom_op(f"nmrun::{name}", function, mutates_args=())
        operation.register_fake(empty)
        return operation

    return made


def followed(
    x: Tensor, operator: Callable[..., Tensor], product: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """``operator`` where a compiler, a tracer or autograd follows x, which know it; else ``product``
    itself, which is faster."""
    differentiated = x.requires_grad and torch.is_grad_enabled()
    return product if has_memory(x) and not differentiated else operator


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
