"""N:M activations: what lies between the two products of a feed-forward layer, pruned for each token.

With inputs X (tokens, in), weights V (features, in) and W (out, features), and the projection P that
keeps the N largest magnitudes of every M features of a token::

    A = relu(X V^T)^2        Z = P(A) = m * A        Y = Z W^T

After Haziza et al. 2025 (arXiv 2503.16672): most entries of a squared ReLU are 0 by themselves, so
2:4 loses few. The gradient is that of this function with its mask m held::

    dA = m * (dY W)          dW = dY^T Z

so Y and the gradient of X are products whose one operand is N:M along the features, which they sum
over. That the mask of the forward pass counts in the backward pass too is the paper's by the account
of others who built it; the body of the paper was not at hand. Not here is what it does to the two
weight gradients, which sum over the tokens: see docs/activations.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold


class SquaredReLU(nn.Module):
    """``relu(x)^2`` (So et al. 2021, arXiv 2109.08668): x and the result have any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


def keep_largest(activations: Tensor, pattern: Pattern) -> Tensor:
    """Keep the N largest magnitudes of every M features of each token.

    Of a V:N:M pattern, every block of V consecutive tokens and M features first keeps the four
    features with the largest sum of magnitudes; the last block is filled up with tokens of zeros.
    Ties keep the lower index, and a NaN is kept.

    Args:
        activations: (..., features), features a multiple of M; tokens are all other dimensions, in
            their order.
        pattern: the pattern.

    Returns:
        The kept activations and 0 elsewhere, of the same shape and dtype. The gradient passes
        where they are not 0; it is autograd's, and torch.compile sees a single operator.

    Raises:
        ValueError: where M does not divide the features.
    """
    kept: Tensor = torch.ops.nmrun.keep_largest(activations, pattern.n, pattern.m, pattern.v)
    return kept


@torch.library.custom_op("nmrun::keep_largest", mutates_args=())
def _keep_largest(activations: Tensor, n: int, m: int, v: int) -> Tensor:
    tokens = activations.reshape(-1, activations.shape[-1])
    filled = functional.pad(tokens, (0, 0, 0, -len(tokens) % v))
    kept = hard_threshold(filled, Pattern(n, m, v=v))
    return kept[: len(tokens)].reshape(activations.shape)


@_keep_largest.register_fake
def _(activations: Tensor, n: int, m: int, v: int) -> Tensor:
    return activations.new_empty(activations.shape)


def _remember(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)  # the next layer keeps it anyway


def _pass_kept(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (kept,) = ctx.saved_tensors
    return torch.where(kept != 0, gradient, 0.0), None, None, None


_keep_largest.register_autograd(_pass_kept, setup_context=_remember)
