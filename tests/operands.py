"""Operands of products in tests: the same numbers for the same shape and seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from nmrun.sparsity import nm_mask


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device="cpu")


def normal_bf16(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).bfloat16()


def sparse(rows: int, columns: int, pattern: str) -> Tensor:
    """A weight with zeros by ``pattern`` along its rows."""
    weight = normal(rows, columns, seed=rows + columns)
    return torch.where(nm_mask(weight, pattern, 1, pad=True), weight, 0.0)


def cases(
    patterns: Sequence[str], shapes: Sequence[tuple[int, int]], of_all: tuple[int, int]
) -> list[tuple[str, int, int]]:
    """Every pattern at the shape ``of_all``, and every shape with three of the patterns in turn:
    where a matrix ends has nothing to do with how many non-zeros its rows have.
    """
    turns = [
        (patterns[(3 * i + k) % len(patterns)], *s) for i, s in enumerate(shapes) for k in range(3)
    ]
    return list(dict.fromkeys([*((pattern, *of_all) for pattern in patterns), *turns]))


DEFAULTS = (torch.float64, torch.float16, torch.device("meta"))


@contextlib.contextmanager
def by_default(other: torch.dtype | torch.device) -> Iterator[None]:
    """Let torch make tensors of another dtype, or on another device, where nothing else is said."""
    if isinstance(other, torch.device):
        with other:
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(other)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def under_autocast(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A forward pass under autocast to bfloat16."""

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x)

    return forward
