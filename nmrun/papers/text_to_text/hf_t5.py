"""A pretrained T5 of Hugging Face, which writes an answer to a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab.tasks.hugging_face import check_vocabulary, fetch, fetch_whole


class T5Network(nn.Module):
    """Input tokens (B, T), mask (B, T) bool (False is padding) and targets (B, L), below 0 where
    they have ended; output (B, L, vocabulary), each from the targets before it.

    Args:
        network: ``T5ForConditionalGeneration``, or another such network of transformers.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        config = self.network.config
        first = torch.full_like(targets[:, :1], config.decoder_start_token_id)
        before = torch.cat([first, targets[:, :-1]], 1)
        return self.network(
            input_ids=tokens,
            # transformers looks whether a mask pads anything; a tensor without values cannot tell
            attention_mask=None if mask.is_meta else mask.long(),
            decoder_input_ids=before.masked_fill(before < 0, config.pad_token_id),
            use_cache=False,
        ).logits

    def get_output_embeddings(self) -> nn.Module:
        """The head, as transformers' models name theirs."""
        return self.network.get_output_embeddings()


def build(vocabulary: int, max_length: int, pretrained: str) -> T5Network:
    """Load a pretrained network in float32. Its dropout is that of its ``config.json``, its
    positions are relative and have no end.

    Raises:
        ConfigError: where it cannot be loaded, is no T5, has another vocabulary than the data, or
            has weights that do not fit its ``config.json``.
    """
    config = fetch("AutoConfig", "model.pretrained", pretrained)
    if config.model_type != "t5":
        raise ConfigError(f"model.pretrained={pretrained}: {config.model_type} is no T5")
    check_vocabulary(pretrained, config.vocab_size, vocabulary)
    return T5Network(fetch_whole("T5ForConditionalGeneration", pretrained))
