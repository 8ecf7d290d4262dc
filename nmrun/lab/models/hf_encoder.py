"""A pretrained encoder of Hugging Face (BERT, RoBERTa, DistilBERT, ELECTRA, MiniLM, ...) with a new
head, for fine-tuning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.lab.tasks.hugging_face import fetch


class EncoderClassifier(nn.Module):
    """An encoder as ``AutoModel`` makes it, and a linear ``head`` after dropout.

    Input tokens (B, T), mask (B, T) bool (False is padding), segments (B, T); output (B, classes).

    Args:
        pooling: what the head sees: ``cls`` (the first token, through the encoder's own pooler if
            it has one), ``mean`` (over a text's tokens), or ``similarity``: the two texts of a pair
            go through the encoder one by one, and the head sees ``10 (c - 0.5)``, c the cosine
            between their means, as encoders of sentences are trained (Reimers & Gurevych 2019,
            arXiv 1908.10084); so small a head wants ``optimizer.head_lr=0.02`` or so.
        dropout: of what the head sees, but for ``similarity``.

    Raises:
        ConfigError: in a forward pass, for single texts with ``similarity``.
    """

    def __init__(self, encoder: Any, classes: int, pooling: str, dropout: float) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(1 if pooling == "similarity" else encoder.config.hidden_size, classes)
        nn.init.normal_(self.head.weight, std=0.02)  # as in BERT
        nn.init.zeros_(self.head.bias)
        self.has_segments = getattr(encoder.config, "type_vocab_size", 0) > 1

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        if self.pooling == "similarity":
            first, second = (
                self._mean(text, mask, torch.zeros_like(text)).float()
                for text, mask in _apart(tokens, mask, segments)
            )
            cosine = functional.cosine_similarity(first, second)[:, None]
            # around zero, so that weight and bias can be told apart
            return self.head(10 * (cosine - 0.5))
        if self.pooling == "mean":
            return self.head(self.dropout(self._mean(tokens, mask, segments)))
        out = self._encoded(tokens, mask, segments)
        pooled = getattr(out, "pooler_output", None)
        return self.head(self.dropout(out.last_hidden_state[:, 0] if pooled is None else pooled))

    def _encoded(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Any:
        inputs = {"token_type_ids": segments} if self.has_segments else {}
        # transformers looks whether a mask pads anything; a tensor without values, for counting
        # FLOPs, cannot tell
        return self.encoder(tokens, attention_mask=None if mask.is_meta else mask.long(), **inputs)

    def _mean(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        states = self._encoded(tokens, mask, segments).last_hidden_state
        weights = mask[:, :, None].to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1)


def _apart(tokens: Tensor, mask: Tensor, segments: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Tokens and mask of the first texts of pairs and of the second ones, these with the token that
    begins the pair before them.
    """
    second = mask & (segments == 1)
    firsts, seconds = (mask & ~second).sum(1), second.sum(1)
    wide = tokens.shape[1]
    long_first, long_second = (
        (wide - wide // 2, wide // 2) if mask.is_meta else (int(firsts.max()), int(seconds.max()))
    )
    if not long_second:
        raise ConfigError(
            "model.pooling=similarity is for pairs of texts, and these are single ones"
        )
    at = torch.arange(long_second + 1, device=tokens.device)
    places = torch.where(at > 0, firsts[:, None] + at - 1, 0).clamp_max(wide - 1)
    ahead = torch.arange(long_first, device=tokens.device)
    return [
        (tokens[:, :long_first], ahead < firsts[:, None]),
        (tokens.gather(1, places), at <= seconds[:, None]),
    ]


def build(
    vocabulary: int,
    max_length: int,
    classes: int,
    pretrained: str,
    pooling: str,
    dropout: float,
) -> EncoderClassifier:
    """Build a classifier on a pretrained encoder, in float32.

    Args:
        pretrained: the encoder's folder, or its name on the hub.

    Raises:
        ConfigError: if it cannot be had, is no encoder, does not fit the data's tokens, or if its
            weights are of another architecture than its ``config.json`` says (with the first key
            that differs).
    """
    where = f"model.pretrained={pretrained}"
    config = fetch("AutoConfig", "model.pretrained", pretrained)
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    if config.model_type not in ENCODERS or config.is_encoder_decoder:
        raise ConfigError(f"{where}: {config.model_type} is no encoder such as BERT")
    if config.vocab_size < vocabulary:
        raise ConfigError(
            f"{where}: it knows {config.vocab_size} tokens and the data have {vocabulary}: take its own tokenizer (dataset.tokenizer)"
        )
    most = getattr(config, "max_position_embeddings", max_length)
    if most < max_length:
        raise ConfigError(
            f"dataset.max_length={max_length}: {pretrained} takes at most {most} tokens"
        )
    encoder, info = fetch(
        "AutoModel", "model.pretrained", pretrained,
        config=config, dtype="float32", output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    shapes = {
        key: (_shape(found), _shape(wanted)) for key, found, wanted in info["mismatched_keys"]
    }
    # pretrained without one: it begins at random
    missing = {key for key in info["missing_keys"] if "pooler" not in key}
    for key in encoder.state_dict():
        if key in shapes:
            raise ConfigError(
                f"{where}: {key} is {shapes[key][0]} in its weights, {shapes[key][1]} by its config.json"
            )
        if key in missing:
            others = (
                f" (they have {min(info['unexpected_keys'])})" if info["unexpected_keys"] else ""
            )
            raise ConfigError(
                f"{where}: its weights have no {key}, which a {config.model_type} by its config.json has{others}"
            )
    return EncoderClassifier(encoder, classes, pooling, dropout)


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape))
