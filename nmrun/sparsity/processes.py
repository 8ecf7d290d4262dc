"""Weights of a run with several processes: what replicas (DDP) must have alike, which shards (FSDP)
can be sparse, and sums over them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.sparsity.weight import SparseWeight


@torch.no_grad()
def agree_over_ranks(recipe: Any, weights: Sequence[SparseWeight]) -> bool:
    """Give every rank rank 0's tensors of replicated weights where they differ; whether there were
    any. Ranks that called ``sparsify`` before DDP synchronised their models have equal projected
    weights but different dense weights, masks and scales. Ranks with different seeds have
    different scores. A weight whose projected and dense values both differ is not replicated and
    stays. Where a tensor was replaced, the recipe goes on from rank 0's clock and seed."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    plain = [w for w in weights if w.has_dense and not w.is_sharded]
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [(w.name, tuple(w.shape), sorted(w.saved())) for w in plain])
    if not plain or any(other != names[0] for other in names):
        return False
    owned = [[w.weight, w.dense, *(w[key] for key in sorted(w.saved()))] for w in plain]
    prints = torch.stack([_fingerprint(tensor) for tensors in owned for tensor in tensors])
    everyone = [torch.empty_like(prints) for _ in names]
    dist.all_gather(everyone, prints)
    same = torch.stack([(other == everyone[0]).all(1) for other in everyone]).all(0).tolist()
    replaced = False
    for _, *tensors in owned:
        projected, *others = [same.pop(0) for _ in range(len(tensors) + 1)]
        if (projected or others[0]) and not all(others):
            replaced = True
            for tensor in tensors:
                whole = tensor.contiguous()
                dist.broadcast(whole.view(torch.uint8) if whole.dtype == torch.bool else whole, 0)
                tensor.copy_(whole)
    state = [recipe.state_dict()]
    dist.broadcast_object_list(state, src=0)
    if replaced:
        recipe.load_state_dict(state[0])
    return replaced


def _fingerprint(tensor: Tensor) -> Tensor:
    """Three sums (3,), float64, which are the same for hardly any two tensors."""
    flat = tensor.detach().double().flatten()
    positions = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64)
    return torch.stack([flat.sum(), flat.square().sum(), (flat * positions.sqrt()).sum()])


def check_shards(weights: Sequence[SparseWeight], across: str = "", by_fsdp: bool = False) -> None:
    """Refuse sharded weights whose masks a process cannot choose from its own part. ``across``: who
    looks across the rows of a weight, if anybody does; V:N:M masks do anyway. Raises ConfigError
    for such a weight, for one whose groups of M lie in two processes, and for one that is placed in
    another way. Also where weights are spread in several ways ``by_fsdp``, which synchronises no
    others; tensor parallelism needs no synchronising."""
    sharded = [weight for weight in weights if weight.is_sharded]
    for weight in weights if sharded else ():
        why = _shard_obstacle(weight, across) if weight.is_sharded else ""
        if by_fsdp and not why and not _same_sharding(weight, sharded[0]):
            why = f"not sharded over the same processes as {sharded[0].name}: shard the whole model"
        if why:
            raise ConfigError(f"{weight.name} is {why}, or leave it dense (exclude)")


def _shard_obstacle(weight: SparseWeight, across: str) -> str:
    if who := across or (f"a {weight.pattern} mask" if weight.pattern.v > 1 else ""):
        return f"sharded (FSDP), and {who} looks across the rows of a weight: replicate it (DDP)"
    for placed in _placements(weight):
        if not (placed.is_replicate() or type(placed).__name__ == "Shard"):
            return f"distributed as {placed}: replicate it, or shard it along one dimension"
    processes, inputs, m = _along(weight), weight.shape[weight.dim], weight.pattern.m
    if processes > 1 and inputs % (processes * m):
        return (
            f"sharded over {processes} processes along its {inputs} inputs, not a multiple of {m} in "
            f"each: shard it along dimension {weight.outputs} (shard_placement_fn of fully_shard)"
        )
    return ""


def global_sum(
    weights: Sequence[SparseWeight], measure: Callable[[Sequence[SparseWeight]], Tensor]
) -> Tensor:
    """A sum over the weights of all processes. ``measure`` gives that over this process's parts of
    some of them; weights that are whole in each process count once."""
    return functools.reduce(torch.add, (added(each, measure(each)) for each in alike(weights)))


def alike(weights: Sequence[SparseWeight]) -> list[Sequence[SparseWeight]]:
    """The weights by how they are spread over the processes; a single list, which may be empty, in
    most models."""
    kinds: list[list[SparseWeight]] = []
    for weight in weights:
        same = (each for each in kinds if _same_sharding(weight, each[0]))
        if (kind := next(same, None)) is None:
            kinds.append([weight])
        else:
            kind.append(weight)
    return [*kinds] if len(kinds) > 1 else [weights]


def added(weights: Sequence[SparseWeight], sums: Tensor) -> Tensor:
    """Add up sums over this process's parts of weights that are spread :func:`alike` over all
    processes, in place; unchanged where the weights are not sharded."""
    if weights and weights[0].is_sharded:
        like: Any = weights[0].parameter
        for dim, placement in enumerate(like.placements):
            if placement.is_shard():  # other dimensions of the mesh are replicas
                dist.all_reduce(sums, group=like.device_mesh.get_group(dim))
    return sums


def _placements(weight: SparseWeight) -> Sequence[Any]:
    parameter: Any = weight.parameter
    return tuple(parameter.placements)


def _along(weight: SparseWeight) -> int:
    """Over how many processes the inputs of a sharded weight are spread."""
    parameter: Any = weight.parameter
    placements, mesh = enumerate(_placements(weight)), parameter.device_mesh
    return math.prod(mesh.size(i) for i, placed in placements if placed.is_shard(weight.dim))


def _same_sharding(weight: SparseWeight, other: SparseWeight) -> bool:
    first: Any = weight.parameter
    second: Any = other.parameter
    if not (weight.is_sharded and other.is_sharded):
        return weight.is_sharded == other.is_sharded
    kinds = [[p.is_shard() for p in _placements(each)] for each in (weight, other)]
    return bool(first.device_mesh == second.device_mesh and kinds[0] == kinds[1])
