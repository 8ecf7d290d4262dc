"""Sharded weights (DTensors, as ``fully_shard`` makes them): which can be sparse, and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.sparsity.weight import SparseWeight


def check_shards(weights: Sequence[SparseWeight], across: str = "") -> None:
    """Refuse sharded weights whose masks a process cannot choose from its own part.

    Args:
        weights: the sparse weights.
        across: who looks across the rows of a weight, if anybody does. V:N:M masks do anyway.

    Raises:
        ConfigError: for a part of a weight that is looked at across rows; for a weight that is
            sharded along the dimension of its groups, or whose placement is neither replicated nor
            a plain shard; where weights differ in their device mesh or placements.
    """
    sharded = [weight for weight in weights if weight.is_sharded]
    for weight in sharded:
        if who := across or (f"a {weight.pattern} mask" if weight.pattern.v > 1 else ""):
            raise ConfigError(
                f"{who} looks across the rows of a weight, and of {weight.name} this process has a "
                "part only (FSDP): replicate the model (DDP)"
            )
        placements = _placements(weight)
        if any(p.is_shard(weight.dim) for p in placements):
            raise ConfigError(
                f"{weight.name} is sharded along dimension {weight.dim}, which its groups of "
                f"{weight.pattern.m} run along: shard it along dimension {weight.outputs} "
                "(shard_placement_fn of fully_shard)"
            )
        if odd := [p for p in placements if not (p.is_replicate() or type(p).__name__ == "Shard")]:
            raise ConfigError(
                f"{weight.name} is distributed as {odd[0]}: sparse weights can be replicated or sharded along one dimension"
            )
    for weight in weights:
        if sharded and not (weight.is_sharded and _alike(weight, sharded[0])):
            raise ConfigError(
                f"{weight.name} is not sharded over the same processes as {sharded[0].name}: "
                "shard the whole model, or leave one of them dense (exclude)"
            )


def summed(weights: Sequence[SparseWeight], sums: Tensor) -> Tensor:
    """Add up the sums of all processes, in place.

    Args:
        weights: the sparse weights.
        sums: sums over this process's parts of the weights.

    Returns:
        ``sums``, now over the whole weights; unchanged where the weights are not sharded.
    """
    if weights and weights[0].is_sharded:
        like: Any = weights[0].parameter
        for dim, placement in enumerate(like.placements):
            if placement.is_shard():  # other dimensions of the mesh are replicas
                dist.all_reduce(sums, group=like.device_mesh.get_group(dim))
    return sums


def _placements(weight: SparseWeight) -> Sequence[Any]:
    parameter: Any = weight.parameter
    return tuple(parameter.placements)


def _alike(weight: SparseWeight, other: SparseWeight) -> bool:
    own: Any = weight.parameter
    its: Any = other.parameter
    kinds = [[p.is_shard() for p in _placements(each)] for each in (weight, other)]
    return bool(own.device_mesh == its.device_mesh and kinds[0] == kinds[1])
