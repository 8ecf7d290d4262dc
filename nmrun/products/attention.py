"""Attention as a module, so that a run can choose how it is computed; and torch's own, by its layers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional


class DotProductAttention(nn.Module):
    """torch's ``scaled_dot_product_attention`` of queries, keys and values (batch, heads, tokens, width).

    ``in_float32``: what comes in bfloat16 is computed in float32 in training, and rounded at the end. On
    CPUs torch's own backward pass is mostly slower in bfloat16.
    """

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal, self.in_float32 = causal, False

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, dropout: float = 0.0
    ) -> Tensor:
        """``dropout``: the share of weights that are zero in this pass."""
        if self.in_float32 and self.training and queries.dtype == torch.bfloat16:
            with torch.autocast("cpu", enabled=False):
                whole = (queries.float(), keys.float(), values.float())
                return self._attend(*whole, dropout).to(torch.bfloat16)
        return self._attend(queries, keys, values, dropout)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, dropout: float) -> Tensor:
        return functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=self.causal
        )


@contextlib.contextmanager
def slow_path() -> Iterator[None]:
    """Let torch's Transformer layers compute by operators that hooks, compilers and converters know."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Let compiled models compute by their layers: their graphs do not call hooks that came later."""
    # who has compiled something has loaded the compiler, which takes a second
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
