"""Vision transformers (Dosovitskiy et al. 2021; DeiT, Touvron et al. 2021), by torchvision's
implementation.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.step.activations import SquaredReLU

SMALL, PATCHES = 64, (4, 16)  # images below so many pixels have patches of 4


class ImageAttention(nn.Module):
    """Self-attention in the place of ``nn.MultiheadAttention``, with its initial weights:
    ``query``, ``key`` and ``value`` are layers of their own, so that each of them can be sparse or
    dense."""

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = fused.num_heads
        self.query, self.key, self.value = (
            _linear(weight.clone(), bias.clone())
            for weight, bias in zip(
                fused.in_proj_weight.detach().chunk(3),
                fused.in_proj_bias.detach().chunk(3),
                strict=True,
            )
        )
        self.out_proj = _linear(fused.out_proj.weight.detach(), fused.out_proj.bias.detach())

    def forward(self, x: Tensor, *same: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        """(B, T, width) to the same, and None; called as ``attention(x, x, x,
        need_weights=False)``.
        """
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width)), None


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


def build(
    shape: tuple[int, ...],
    classes: int,
    layers: int,
    heads: int,
    width: int,
    patch: int | None,
    dropout: float,
    stochastic_depth: float,
    activation: str,
) -> nn.Module:
    """Build torchvision's VisionTransformer, for square images.

    Args:
        shape: (C, H, W) with H = W.
        layers, heads, width: of the encoder; feed-forward layers have four times the width.
        patch: pixels a side, which divide the image's; None: by the size of the image.
        stochastic_depth: the probability that the last block is left out; it rises linearly from
            the first to the last (Huang et al. 2016).
        activation: of the feed-forward layers, ``gelu`` or ``relu2``, the squared ReLU.

    Returns:
        Images (B, C, H, W) to logits (B, classes), with its initial weights.

    Raises:
        ConfigError: for sizes that do not divide.
    """
    from torchvision.models import VisionTransformer
    from torchvision.ops import StochasticDepth

    channels, height, side = shape
    patch = patch or PATCHES[side >= SMALL]
    if height != side or side % patch:
        raise ConfigError(
            f"model.patch={patch}: images of {height}x{side} are not squares of a multiple of that"
        )
    if width % heads:
        raise ConfigError(
            f"model.width={width} cannot be split into model.heads={heads} heads of the same size"
        )
    model = VisionTransformer(
        side, patch, layers, heads, width, 4 * width, dropout, num_classes=classes
    )
    if channels != 3:
        model.conv_proj = nn.Conv2d(channels, width, patch, patch)
        nn.init.trunc_normal_(model.conv_proj.weight, std=math.sqrt(1 / (channels * patch * patch)))
        nn.init.zeros_(model.conv_proj.bias)
    blocks: Any = model.encoder.layers
    for number, block in enumerate(blocks):
        drop = stochastic_depth * number / max(layers - 1, 1)
        block.self_attention = ImageAttention(block.self_attention)
        if activation == "relu2":
            block.mlp[1] = SquaredReLU()
        if drop:
            block.dropout = nn.Sequential(block.dropout, StochasticDepth(drop, "row"))
            block.mlp.append(StochasticDepth(drop, "row"))
    return model
