"""GPT-2 with a new head, to fine-tune what was pre-trained as ``model=gpt2``: its run is given as
``init=RUN``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab.models.gpt import GPTDecoder


class Headed(GPTDecoder):
    """A decoder and a linear ``head`` with as many outputs as there are classes.

    Inputs are tokens (B, T), mask (B, T) bool (False is padding, at the right) and segments (B, T),
    which GPT-2 does not look at.

    Attributes:
        heads_of_tasks: modules that ``init=RUN`` leaves as they are, here and there.

    Args:
        vocabulary, context, layers, heads, width, dropout, bias, activation: as of
            :class:`nmrun.lab.models.gpt.GPTDecoder`.
    """

    heads_of_tasks: ClassVar[tuple[str, ...]] = ("lm_head", "head")

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float,
        bias: bool,
        activation: str,
        classes: int,
        head_bias: bool,
    ) -> None:
        super().__init__(vocabulary, context, layers, heads, width, dropout, bias, activation)
        self.head = nn.Linear(width, classes, bias=head_bias)
        self.initialise()


class GPTClassifierNetwork(Headed):
    """Texts to logits (B, classes): the head sees a text's last token, which has seen all others."""

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        last = mask.sum(1) - 1
        return self.head(self.states(tokens)[torch.arange(len(last), device=last.device), last])


def classifier(
    vocabulary: int,
    max_length: int,
    classes: int,
    layers: int,
    heads: int,
    width: int,
    dropout: float,
    bias: bool,
    context: int,
    embeddings: int | None,
    activation: str,
) -> GPTClassifierNetwork:
    """Build a classifier; its head has no bias, as in transformers.

    Args:
        embeddings: tokens, as in pre-training; None: those of the data.

    Raises:
        ConfigError: where the data have more positions or tokens.
    """
    known = embedded(vocabulary, max_length, context, embeddings)
    return GPTClassifierNetwork(
        known, context, layers, heads, width, dropout, bias, activation, classes, head_bias=False
    )


def embedded(vocabulary: int, max_length: int, context: int, embeddings: int | None) -> int:
    """How many tokens a network embeds: ``embeddings``, or those of the data.

    Raises:
        ConfigError: where the data have more positions or tokens than the network.
    """
    if max_length > context:
        raise ConfigError(
            f"dataset.max_length={max_length}: the network has model.context={context} positions"
        )
    if embeddings is not None and embeddings < vocabulary:
        raise ConfigError(
            f"model.embeddings={embeddings}: the data have {vocabulary} tokens, which need as many"
        )
    return vocabulary if embeddings is None else embeddings
