"""Checks that weights are N:M."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nmrun.patterns import COLUMNS, Pattern
from nmrun.sparsity.layers import check_module
from nmrun.sparsity.reference import grouped, holds
from nmrun.sparsity.select import LeftDense, select


def check_nm(
    model_or_tensor: nn.Module | Tensor,
    pattern: str | Pattern,
    dim: int = 1,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = "auto",
    overrides: Mapping[str, str | Pattern] | None = None,
    pad: bool = False,
    dims: Mapping[str, int] | None = None,
) -> list[str]:
    """Check that at most N of every M consecutive weights are non-zero, of one tensor or of a model.

    For V:N:M the blocks are checked as well. Of a model, the weights are checked that
    :func:`nmrun.sparsify` would make sparse with these options.

    Args:
        dim: the dimension that the groups of a tensor run along; not read for a model.
        include: which weights of a model, as in :func:`nmrun.sparsify`; so are ``exclude``,
            ``overrides`` and ``dims``.
        pad: let the last group be short. Without it, a tensor's size must be a multiple of M.

    Returns:
        The names of the weights that were checked; ``["tensor"]`` for a tensor.

    Raises:
        ValueError: with the first layer and group that has more than N non-zeros. Also for a model
            without a weight to check, and for a tensor whose size is no multiple of M.
    """
    pattern = Pattern.parse(pattern)
    if isinstance(model_or_tensor, Tensor):
        weights = [("tensor", model_or_tensor, dim, pattern)]
    else:
        check_module(model_or_tensor, "check_nm")
        candidates = select(
            model_or_tensor, pattern, include, exclude, None, overrides, None, pad, dims
        )[0]
        weights = [(c.name, c.parameter, c.dim, c.pattern or pattern) for c in candidates]
        if not weights:
            raise ValueError(f"no weight of this model could hold {pattern}: nothing to check")
    for name, weight, along, ratio in weights:
        groups, _, d = grouped(weight, ratio, along, pad)
        if holds(groups, ratio, d):
            continue
        count = (groups != 0).sum(d)
        if bool((count > ratio.n).any()):
            first = (count > ratio.n).nonzero()[0].tolist()
            start = first[d - 1] * ratio.m
            end = min(start + ratio.m, weight.shape[d - 1])
            place = [str(index) for index in first]
            place[d - 1] = f"{start}-{end - 1}"
            raise ValueError(
                f"{name} is not {ratio}: {int(count[tuple(first)])} of {end - start} weights at [{', '.join(place)}] are non-zero"
            )
        raise ValueError(
            f"{name} is not {ratio}: {ratio.v} outputs have non-zeros in more than {COLUMNS} of {ratio.m} columns"
        )
    return [name for name, *_ in weights]


def layer_report(name: str, weight: Tensor, pattern: Pattern, dim: int) -> dict[str, Any]:
    """One layer's weight for a report: ``name``, ``shape``, ``pattern`` (text), ``dim``, ``numel``,
    ``nonzeros``, ``holds``."""
    return {
        "name": name,
        "shape": list(weight.shape),
        "pattern": str(pattern),
        "dim": dim,
        "numel": weight.numel(),
        "nonzeros": int((weight != 0).sum()),
        "holds": holds(*grouped(weight, pattern, dim)),
    }


def weights_report(
    pattern: str, layers: list[dict[str, Any]], left_dense: Sequence[LeftDense]
) -> dict[str, Any]:
    """Describe the weights of a network, by its layers' reports of :func:`layer_report`. Returns
    plain data: ``pattern``, ``dense`` without sparse weights; ``density``, the share of
    non-zeros in the sparse weights; ``layers``; ``left_dense``, each with ``name``, ``shape``
    and ``reason``."""
    numel = sum(layer["numel"] for layer in layers)
    return {
        "pattern": pattern if layers else "dense",
        "density": sum(layer["nonzeros"] for layer in layers) / numel if numel else 1.0,
        "layers": layers,
        "left_dense": [
            {"name": d.name, "shape": list(d.shape), "reason": d.reason} for d in left_dense
        ],
    }
