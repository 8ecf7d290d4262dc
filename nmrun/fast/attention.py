"""``nn.MultiheadAttention`` for inference, with a layer in the place of each of its weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MaskedAttention(nn.Module):
    """:func:`torch.nn.functional.scaled_dot_product_attention`, where another layer may take its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """All are (batch, heads, tokens, width); the mask is added to the scores."""
        return F.scaled_dot_product_attention(q, k, v, mask)


class PackedAttention(nn.Module):
    """``nn.MultiheadAttention`` with layers in the place of its weights: ``query`` with (embed_dim,)
    outputs, ``key_value`` with (2 embed_dim,), and ``out``. The keys and values of ``attention`` are as
    wide as its queries."""

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        query: nn.Module,
        key_value: nn.Module,
        out: nn.Module,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.batch_first = attention.batch_first
        # torch's encoder layers look at these before they read weights past the layers
        self.in_proj_bias, self._qkv_same_embed_dim = None, False
        self.query, self.key_value, self.out_proj = query, key_value, out
        self.attention = MaskedAttention()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As :meth:`torch.nn.MultiheadAttention.forward`, without dropout."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        single, same = query.dim() == 2, key is value
        query, key, value = (self._batched(t) for t in (query, key, value))
        if single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        k, v = self.key_value(key).chunk(2, -1)
        if not same:
            v = self.key_value(value).chunk(2, -1)[1]
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (self.query(query), k, v)
        )
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2])
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            z = weights @ v
        else:
            z = self.attention(q, k, v, mask)
        z = self.out_proj(z.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if single:
            return z[0], None if weights is None else weights[0]
        return z if self.batch_first else z.transpose(0, 1), weights

    def _batched(self, t: Tensor) -> Tensor:
        return t[None] if t.dim() == 2 else t if self.batch_first else t.transpose(0, 1)

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int
    ) -> Tensor | None:
        """Both masks, to be added to the scores (batch, heads, queries, keys)."""
        mask = None
        if attn_mask is not None:
            mask = _added(attn_mask, q)
            mask = mask.view(-1, self.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask
        if padding is not None:
            padding = _added(padding, q).view(len(padding), 1, 1, keys)
            mask = padding if mask is None else mask + padding
        return mask


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
