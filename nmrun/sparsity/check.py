"""Proof that weights are N:M."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from nmrun.patterns import Pattern
from nmrun.sparsity.masks import grouped
from nmrun.sparsity.select import select


def check_nm(
    model_or_tensor: nn.Module | Tensor,
    pattern: str | Pattern,
    dim: int = 1,
    include: str | list[str] | None = None,
    exclude: str | list[str] = (),  # type: ignore[assignment]
    overrides: Mapping[str, str | Pattern] | None = None,
    pad: bool = False,
    dims: Mapping[str, int] | None = None,
) -> list[str]:
    """Raise ValueError unless at most N of every M consecutive weights are non-zero, naming the
    first offending layer and group.

    A tensor is checked along ``dim``; of a model every weight that could hold the pattern, less
    what ``include`` and ``exclude`` (regular expressions for whole module names, or ``"auto"``)
    leave out. ``overrides``, ``pad`` and ``dims`` are those of
    :func:`nmrun.sparsity.select.select`. With ``pad`` the last group of a tensor or of a plain
    model's weights may be short; without it, M must divide the tensor's size. Returns the names
    that were checked.
    """
    pattern = Pattern.parse(pattern)
    if isinstance(model_or_tensor, Tensor):
        weights = [("tensor", model_or_tensor, dim, pattern)]
    else:
        chosen = select(
            model_or_tensor, pattern, include, exclude, None, overrides, None, pad, dims
        )[0]
        weights = [(c.name, c.tensor, c.dim, c.pattern or pattern) for c in chosen]
        if not weights:
            raise ValueError(f"no weight of this model could hold {pattern}: nothing to check")
    for name, weight, along, held in weights:
        groups, _, d = grouped(weight, held, along, pad)
        count = (groups != 0).sum(d)
        if bool((count > held.n).any()):
            first = (count > held.n).nonzero()[0].tolist()
            start = first[d - 1] * held.m
            end = min(start + held.m, weight.shape[d - 1])
            at = ", ".join(
                f"{start}-{end - 1}" if axis == d - 1 else str(i) for axis, i in enumerate(first)
            )
            raise ValueError(
                f"{name} is not {held}: {int(count[tuple(first)])} of {end - start} weights at [{at}] are non-zero"
            )
    return [name for name, *_ in weights]


def layer_report(name: str, weight: Tensor, pattern: Pattern, dim: int) -> dict[str, Any]:
    """One layer's line of a report: name, shape, numel, nonzeros, and whether the pattern holds."""
    groups, _, d = grouped(weight, pattern, dim)
    nonzero = groups != 0
    return {
        "name": name,
        "shape": list(weight.shape),
        "pattern": str(pattern),
        "dim": dim,
        "numel": weight.numel(),
        "nonzeros": int(nonzero.sum()),
        "holds": bool((nonzero.sum(d) <= pattern.n).all()),
    }
