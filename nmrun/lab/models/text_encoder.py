"""A small Transformer encoder for classification, trained from scratch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.step.activations import SquaredReLU


class TextEncoderNetwork(nn.Module):
    """BERT's form (Devlin et al. 2019, arXiv 1810.04805) on ``nn.TransformerEncoder``.

    It has the embeddings ``tokens``, ``positions`` and ``segments``, ``encoder.layers.0``, ...
    (attention ``self_attn``, feed-forward ``linear1`` and ``linear2``; normalised before each), and
    ``head`` on the mean over a text's tokens. Input tokens (B, T) int64, mask (B, T)
    bool (False is padding), segments (B, T) of 0 and 1; output (B, classes).

    Args:
        layers, heads, width: of the encoder; feed-forward layers have four times the width.
        activation: of the feed-forward layers, ``gelu`` or ``relu2``, the squared ReLU.
    """

    def __init__(
        self,
        vocabulary: int,
        max_length: int,
        classes: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float,
        activation: str,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"model.width={width} cannot be split into model.heads={heads} heads of equal width"
            )
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.segments = nn.Embedding(2, width)
        for table in (self.tokens, self.positions, self.segments):
            nn.init.normal_(table.weight, std=0.2)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            *(width, heads, 4 * width, dropout),
            activation=SquaredReLU() if activation == "relu2" else "gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places) + self.segments(segments))
        x = self.encoder(x, src_key_padding_mask=~mask)
        weights = mask[:, :, None].to(x.dtype)
        return self.head((x * weights).sum(1) / weights.sum(1))


def build(
    vocabulary: int,
    max_length: int,
    classes: int,
    layers: int,
    heads: int,
    width: int,
    dropout: float,
    activation: str,
) -> TextEncoderNetwork:
    """Build the encoder.

    Args:
        layers, heads, width: the layers of the encoder, its attention heads, and its width.

    Raises:
        ConfigError: where ``heads`` does not divide ``width``.
    """
    return TextEncoderNetwork(
        vocabulary, max_length, classes, layers, heads, width, dropout, activation
    )
