"""fairseq's Transformer, in its usual sizes."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from nmrun.errors import ConfigError
from nmrun.papers.translation.fairseq_import import fairseq

if TYPE_CHECKING:
    from nmrun.papers.translation.fairseq_modules import TranslationTransformer
    from nmrun.papers.translation.sentences import Dictionary


def build(
    source: Dictionary,
    target: Dictionary,
    width: int,
    ffn: int,
    layers: int,
    heads: int,
    dropout: float,
    attention_dropout: float,
    activation_dropout: float,
    share_embeddings: str,
) -> TranslationTransformer:
    """Build a Transformer between two dictionaries; parameters have fairseq's names.

    Args:
        layers: of the encoder, and as many of the decoder.
        dropout, attention_dropout, activation_dropout: probabilities, where fairseq has them.
        share_embeddings: ``decoder`` (its input and output), ``all`` (the encoder's too), ``none``,
            or ``auto``: all where both languages have one dictionary, else decoder.

    Raises:
        ConfigError: if fairseq is not installed, if 2 * ``heads`` does not divide ``width``, and if
            all embeddings are to be shared between two different dictionaries.
    """
    if width % (2 * heads):
        raise ConfigError(f"model.width={width} is not a multiple of 2 * model.heads={heads}")
    joint = source == target
    if share_embeddings == "all" and not joint:
        raise ConfigError(
            "model.share_embeddings=all needs one dictionary for both languages; decoder shares those of the target"
        )
    modules = fairseq("nmrun.papers.translation.fairseq_modules")
    config = modules.TransformerConfig.from_namespace(
        Namespace(
            **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in [
                ("embed_dim", width), ("ffn_embed_dim", ffn), ("layers", layers), ("attention_heads", heads),
            ]},
            decoder_input_dim=width,
            decoder_output_dim=width,
            dropout=dropout,
            attention_dropout=attention_dropout,
            activation_dropout=activation_dropout,
            share_all_embeddings=share_embeddings == "all" or (share_embeddings == "auto" and joint),
            share_decoder_input_output_embed=share_embeddings in ("auto", "decoder", "all"),
        )
    )  # fmt: skip
    model: TranslationTransformer = modules.TranslationTransformer.build_model(
        config, Namespace(source_dictionary=source, target_dictionary=target)
    )
    return model
