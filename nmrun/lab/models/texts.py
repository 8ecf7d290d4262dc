"""Transformers for texts, from scratch: GPT-2 (Radford et al. 2019), with and without a new head
for a task, and a small encoder.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.products.attention import DotProductAttention
from nmrun.step.activations import SquaredReLU


class CausalAttention(nn.Module):
    """Causal self-attention over (B, T, width): ``c_attn`` makes queries, keys and values in one
    product, ``c_proj`` mixes the heads.
    """

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.attend = DotProductAttention(causal=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        queries, keys, values = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, 2)
        )
        p = self.dropout.p if self.training else 0.0
        mixed = self.attend(queries, keys, values, p)
        return self.dropout(self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width)))


class FeedForward(nn.Module):
    """``c_fc`` to four times the width, ``activation``, ``c_proj`` back. ``activation`` is ``gelu``
    (by tanh, as in GPT-2) or ``relu2``, the squared ReLU.
    """

    def __init__(self, width: int, dropout: float, bias: bool, activation: str) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        squared = activation == "relu2"
        self.activation = SquaredReLU() if squared else nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, activation: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = CausalAttention(width, heads, dropout, bias)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = FeedForward(width, dropout, bias, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPTDecoder(nn.Module):
    """GPT-2 with the head of a subclass: learned positions, and layer norm before each block. Modules
    have the names of the original's variables.

    Weights start normal with deviation 0.02, those that end in the residual stream with 0.02 /
    sqrt(2 * layers) (section 2.3).
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        bias: bool = True,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            Block(width, heads, dropout, bias, activation) for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width, bias=bias)
        self.add_head(vocabulary, width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                ends = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)

    def add_head(self, vocabulary: int, width: int) -> None:
        """Make the layer that sees :meth:`states`."""
        raise NotImplementedError

    def states(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T), T at most ``context``, to what a head sees of each (B, T, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPTNetwork(GPTDecoder):
    """Tokens (B, T) to logits (B, T, ``vocabulary``); ``wte`` and ``lm_head`` are one weight."""

    def add_head(self, vocabulary: int, width: int) -> None:
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.states(tokens))


class Headed(GPTDecoder):
    """GPT-2 with a linear ``head`` of ``outputs`` in the place of ``lm_head``, to fine-tune what was
    pre-trained as ``model=gpt2`` (``init=RUN``).

    Inputs are tokens (B, T), mask (B, T) bool (False is padding, at the right) and segments (B, T),
    which GPT-2 does not look at. ``init=RUN`` leaves ``heads_of_tasks`` as they are, here and
    there.
    """

    heads_of_tasks: ClassVar[tuple[str, ...]] = ("lm_head", "head")

    def __init__(self, outputs: int, head_bias: bool, **gpt: Any) -> None:
        self.head_of = outputs, head_bias
        super().__init__(**gpt)

    def add_head(self, vocabulary: int, width: int) -> None:
        outputs, bias = self.head_of
        self.head = nn.Linear(width, outputs, bias=bias)


class GPTClassifierNetwork(Headed):
    """Texts to logits (B, classes): the head sees a text's last token, which has seen all others."""

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        last = mask.sum(1) - 1
        return self.head(self.states(tokens)[torch.arange(len(last), device=last.device), last])


def gpt_classifier(
    vocabulary: int,
    max_length: int,
    classes: int,
    context: int,
    embeddings: int | None,
    **decoder: Any,
) -> GPTClassifierNetwork:
    """A classifier, whose head has no bias, as in transformers; see :func:`embedded`."""
    size = embedded(vocabulary, max_length, context, embeddings)
    return GPTClassifierNetwork(classes, False, vocabulary=size, context=context, **decoder)


def embedded(vocabulary: int, max_length: int, context: int, embeddings: int | None) -> int:
    """How many tokens a network embeds: ``embeddings``, as in pre-training, or those of the data.

    Raises ConfigError where the data have more positions or tokens than the network.
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


class TextEncoderNetwork(nn.Module):
    """BERT's form (Devlin et al. 2019, arXiv 1810.04805) on ``nn.TransformerEncoder``.

    It has the embeddings ``tokens``, ``positions`` and ``segments``, ``encoder.layers.0``, ...
    (normalised before attention and feed-forward), and ``head`` on the mean over a text's tokens.
    Input tokens (B, T) int64, mask (B, T) bool (False is padding), segments (B, T) of 0 and 1;
    output (B, classes).
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
