"""Linear layers around pruned activations on CPUs: products with the activations packed anew in every
pass, as operators that autograd and ``torch.compile`` know.

By the equations of ``nmrun.sparsity.activations``, with Z = m * A of A = relu(B)^2, B = X V^T::

    the layer that reads Z     Y = Z W^T     dZ = dY W, where Z is not 0     dW = dY^T Z
    the layer that feeds it    dX = dB V     dV = dB^T X     with dB, which is 0 where Z is

What is 0 for whatever reason is left out: the squared ReLU's own zeros and those of a dropout too.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nmrun.fast import dense_cpu
from nmrun.fast.kernels import cpu_products
from nmrun.fast.kernels.cpu_products import PackedMatrix, blocks_of

NAME = "packed activations"
READS, FEEDS = "reads", "feeds"


class Pruned(Protocol):
    """What is asked of activations here: see :class:`nmrun.step.activations.SparseActivations`."""

    sparse: bool


def install(module: nn.Module, role: str, onednn: bool, activations: Pruned) -> None:
    """Let a linear layer compute its products so in training, in float32, in steps that prune.

    In all other passes the layer computes as before.

    Args:
        module: ``nn.Linear`` or Hugging Face's ``Conv1D``.
        role: ``reads`` the activations, or ``feeds`` them.
        onednn: the dense product of what feeds is oneDNN's.
        activations: the model's.
    """
    before = vars(module).get("forward")
    own: Callable[..., Tensor] = type(module).forward if before is None else before.__func__
    stored = isinstance(module, nn.Linear)

    def forward(module: Any, x: Tensor) -> Tensor:
        if not (activations.sparse and dense_cpu.takes(module, x)):
            return own(module, x)
        weight = module.weight if stored else module.weight.t()
        flat = x.reshape(-1, x.shape[-1])
        if role == READS:
            y = reads(flat, weight, module.bias)
        else:
            y = feeds(flat, weight, module.bias, onednn)
        return y.view(*x.shape[:-1], len(weight))

    module.forward = types.MethodType(forward, module)


def packed(matrix: Tensor, turned: bool = False) -> list[PackedMatrix]:
    """What is not 0 of a matrix (rows, columns), and of its transpose if asked for."""
    shape = matrix.shape
    made = [_room(*shape), _room(*reversed(shape))][: 1 + turned]
    cpu_products.pack(matrix.contiguous(), *made)
    count = made[0].count
    return [
        PackedMatrix(p.values[:count], p.index[:count], p.start, p.rows, p.columns) for p in made
    ]


def _room(rows: int, columns: int) -> PackedMatrix:
    """Memory for any matrix of this shape, of which only what is filled is ever touched."""
    size = rows * columns
    start = torch.zeros(blocks_of(columns) * rows + 1, dtype=torch.int32)
    return PackedMatrix(
        torch.empty(size), torch.empty(size, dtype=torch.uint8), start, rows, columns
    )


@torch.library.custom_op("nmrun::reads_cpu", mutates_args=())
def reads(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``z W^T + bias`` (tokens, outputs), with z (tokens, features), mostly 0; its gradient where z
    is 0 is 0."""
    (rows,) = packed(z)
    y = cpu_products.multiply(weight.t(), rows, turned=True)
    return y if bias is None else y.add_(bias)


@reads.register_fake
def _(z, weight, bias):  # type: ignore[no-untyped-def]
    return z.new_empty(len(z), len(weight))


@torch.library.custom_op("nmrun::reads_back_cpu", mutates_args=())
def reads_back(z: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dZ (tokens, features) and dW (outputs, features)."""
    rows, turned = packed(z, turned=True)
    dz = cpu_products.sampled(weight, dy.t(), rows)
    return dz, cpu_products.multiply(dy, turned, turned=True).t().contiguous()


@reads_back.register_fake
def _(z, weight, dy):  # type: ignore[no-untyped-def]
    return z.new_empty(z.shape), z.new_empty(weight.shape)


@torch.library.custom_op("nmrun::feeds_cpu", mutates_args=())
def feeds(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
    """``x V^T + bias`` (tokens, features), whose gradient is mostly 0."""
    if onednn:
        return dense_cpu.product(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


@feeds.register_fake
def _(x, weight, bias, onednn):  # type: ignore[no-untyped-def]
    return x.new_empty(len(x), len(weight))


@torch.library.custom_op("nmrun::feeds_back_cpu", mutates_args=())
def feeds_back(db: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dX (tokens, inputs) and dV (features, inputs)."""
    rows, turned = packed(db, turned=True)
    dx = cpu_products.multiply(weight, rows, turned=True)
    return dx, cpu_products.multiply(x, turned, turned=True)


@feeds_back.register_fake
def _(db, x, weight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _reads_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dz, dw = reads_back(*ctx.saved_tensors, dy)
    return dz, dw, dy.sum(0) if ctx.needs_input_grad[2] else None


def _feeds_backward(ctx: Any, db: Tensor) -> tuple[Tensor | None, ...]:
    dx, dv = feeds_back(db, *ctx.saved_tensors)
    return dx, dv, db.sum(0) if ctx.needs_input_grad[2] else None, None


reads.register_autograd(_reads_backward, setup_context=_save)
feeds.register_autograd(_feeds_backward, setup_context=_save)
