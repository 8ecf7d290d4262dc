"""What replicas of a model (DDP) must have alike: dense weights, masks, scales, seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nmrun.sparsity.weight import SparseWeight


class Clock(Protocol):
    """The part of a recipe that is read here."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@torch.no_grad()
def agree_over_ranks(recipe: Clock, weights: Sequence[SparseWeight]) -> bool:
    """Give every rank rank 0's tensors of replicated weights where they differ.

    Ranks that called ``sparsify`` before DDP synchronised their models have equal projected weights
    but different dense weights, masks and scales. Ranks with different seeds have different scores.
    A weight whose projected and dense values both differ is not replicated and stays as it is.

    Args:
        recipe: the recipe; where a tensor was replaced, it goes on from rank 0's clock and seed.
        weights: the sparse weights.

    Returns:
        Whether a tensor was replaced.
    """
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
    """Compute three sums (3,), float64, which are the same for hardly any two tensors."""
    flat = tensor.detach().double().flatten()
    positions = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64)
    return torch.stack([flat.sum(), flat.square().sum(), (flat * positions.sqrt()).sum()])
