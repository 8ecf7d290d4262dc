"""GPT-2 (Radford et al. 2019), from scratch: a decoder with learned positions and layer norm before
each block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
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
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        queries, keys, values = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, 2)
        )
        p = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=p, is_causal=True
        )
        return self.dropout(self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width)))


class FeedForward(nn.Module):
    """``c_fc`` to four times the width, ``activation``, ``c_proj`` back.

    Args:
        activation: ``gelu`` (by tanh, as in GPT-2) or ``relu2``, the squared ReLU.
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
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    Args:
        width, heads, dropout, bias: as of :class:`CausalAttention`; norms have the bias too.
        activation: of :class:`FeedForward`.
    """

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
    """GPT-2 without a head. Modules have the names of the original's variables.

    Weights start normal with deviation 0.02, those that end in the residual stream with 0.02 /
    sqrt(2 * layers) (section 2.3); a subclass calls :meth:`initialise` when it has its head.

    Args:
        heads: of each attention; they divide the width.
        activation: of the feed-forward layers, ``gelu`` or ``relu2``.
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
        self.layers = layers
        if width % heads:
            raise ConfigError(
                f"model.width={width} cannot be split into model.heads={heads} heads of the same size"
            )
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            Block(width, heads, dropout, bias, activation) for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width, bias=bias)

    def initialise(self) -> None:
        """Draw the initial weights."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(
                    parameter,
                    std=0.02 / (2 * self.layers) ** 0.5 if name.endswith("c_proj.weight") else 0.02,
                )

    def states(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T), T at most ``context``, to what a head sees of each (B, T, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPTNetwork(GPTDecoder):
    """Tokens (B, T), T at most ``context``, to logits (B, T, ``vocabulary``). ``wte`` and
    ``lm_head`` are one weight.

    Args:
        vocabulary, context, layers, heads, width, dropout, bias, activation: as of
            :class:`GPTDecoder`.
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
        super().__init__(vocabulary, context, layers, heads, width, dropout, bias, activation)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.states(tokens))


def build(
    vocabulary: int,
    context: int,
    layers: int,
    heads: int,
    width: int,
    dropout: float,
    bias: bool,
    activation: str,
) -> GPTNetwork:
    """Build a GPT with its initial weights."""
    return GPTNetwork(vocabulary, context, layers, heads, width, dropout, bias, activation)
