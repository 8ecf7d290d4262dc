"""GPT-2 with a head for the passage of a text that answers a question."""

from __future__ import annotations

from torch import Tensor

from nmrun.lab.models.gpt_heads import Headed, embedded


class GPTReaderNetwork(Headed):
    """Questions with their texts to logits (B, T, 2): where the answer begins and where it ends."""

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        return self.head(self.states(tokens))


def build(
    vocabulary: int,
    max_length: int,
    layers: int,
    heads: int,
    width: int,
    dropout: float,
    bias: bool,
    context: int,
    embeddings: int | None,
    activation: str,
) -> GPTReaderNetwork:
    """Build a reader; its head has a bias, as in transformers.

    The arguments are those of :func:`nmrun.lab.models.gpt_heads.classifier`, and so are the errors.
    """
    known = embedded(vocabulary, max_length, context, embeddings)
    return GPTReaderNetwork(
        known, context, layers, heads, width, dropout, bias, activation, 2, head_bias=True
    )
