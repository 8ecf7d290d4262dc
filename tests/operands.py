"""Operands of products in tests: the same numbers for the same shape and seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nmrun.sparsity import nm_mask


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def normal_bf16(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).bfloat16()


def sparse(rows: int, columns: int, pattern: str) -> Tensor:
    """A weight with zeros by ``pattern`` along its rows."""
    weight = normal(rows, columns, seed=rows + columns)
    return torch.where(nm_mask(weight, pattern, 1, pad=True), weight, 0.0)


def under_autocast(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A forward pass under autocast to bfloat16."""

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x)

    return forward
