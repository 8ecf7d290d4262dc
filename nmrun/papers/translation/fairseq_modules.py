"""fairseq's Transformer with a forward pass that never looks at the values of its inputs. Import it
by :func:`nmrun.papers.translation.fairseq.fairseq`.

fairseq asks a batch whether it has padding and goes one way or the other. That waits for a GPU,
breaks a compiled graph, and cannot be done where only shapes are known. Here padding is always
masked in the source. It never is in the target, where it comes after the words and none of them
looks that far. The results at real tokens are the same, and so are all names of parameters. Beam
search goes fairseq's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from torch import Tensor

__all__ = [
    "TransformerConfig",
    "TranslationDecoder",
    "TranslationEncoder",
    "TranslationTransformer",
]


class TranslationEncoder(TransformerEncoderBase):
    """(sentences, length) tokens to fairseq's dictionary."""

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, **_: Any
    ) -> dict[str, list[Tensor]]:
        padding = src_tokens.eq(self.padding_idx)
        x, _ = self.forward_embedding(src_tokens)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, encoder_padding_mask=padding)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        nothing: dict[str, list[Tensor]] = {
            "encoder_embedding": [],
            "encoder_states": [],
            "src_tokens": [],
            "src_lengths": [],
        }
        return {"encoder_out": [x], "encoder_padding_mask": [padding], **nothing}


class TranslationDecoder(TransformerDecoderBase):
    """(sentences, length) tokens of the target and the encoder's output to features."""

    def features(self, previous: Tensor, encoded: dict[str, list[Tensor]]) -> Tensor:
        """All places at once, each seeing itself and those before it: (sentences, length, width).
        ``previous`` are tokens of the target (sentences, length), moved by one.
        """
        x = self.embed_scale * self.embed_tokens(previous) + self.embed_positions(previous)
        x = self.dropout_module(x).transpose(0, 1)
        future = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        source, padding = encoded["encoder_out"][0], encoded["encoder_padding_mask"][0]
        for layer in self.layers:
            x, _, _ = layer(x, source, padding, self_attn_mask=future)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x.transpose(0, 1)


class TranslationTransformer(TransformerModelBase):
    """An encoder and a decoder, built by ``build_model`` as fairseq's."""

    def __init__(
        self, config: TransformerConfig, encoder: TranslationEncoder, decoder: TranslationDecoder
    ) -> None:
        super().__init__(config, encoder, decoder)
        for layer in decoder.layers:
            # attention weights are of no use here, and without them attention is one fused
            # operation
            layer.need_attn = False

    @classmethod
    def build_encoder(
        cls, config: TransformerConfig, dictionary: Any, embedding: Any
    ) -> TranslationEncoder:
        return TranslationEncoder(config, dictionary, embedding)

    @classmethod
    def build_decoder(
        cls, config: TransformerConfig, dictionary: Any, embedding: Any
    ) -> TranslationDecoder:
        return TranslationDecoder(config, dictionary, embedding)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None,
        prev_output_tokens: Tensor,
        where: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits (sentences, length, target dictionary), or (tokens, target dictionary) of the
        places ``where`` in the flattened batch (tokens,) alone; and nothing more.

        ``src_tokens`` (sentences, length) are padded at the left; ``prev_output_tokens`` are of the
        target, moved by one.
        """
        features = self.decoder.features(prev_output_tokens, self.encoder(src_tokens))
        if where is not None:
            features = features.flatten(0, 1).index_select(0, where)
        return self.decoder.output_layer(features), {}
