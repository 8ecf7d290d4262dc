"""How much a forward and backward pass costs, dense and with the zeros of sparse weights left out. Counted, not measured."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from nmrun.sparsity.attach import attached
from nmrun.tasks.base import Task


@dataclass(frozen=True)
class Flops:
    """Floating-point operations for one training item (a multiplication and its addition are two).

    ``forward_sparse`` counts N/M of each product with a sparse weight: what hardware that skips every zero could reach.
    ``backward`` is dense: the product that gives a weight's gradient has no sparse operand, and the one that gives the input's
    would need a mask that is N:M along the other dimension too.
    """

    forward: int
    forward_sparse: int
    backward: int


def count(model: nn.Module, task: Task) -> Flops:
    """Count one item of ``task`` through a copy of ``model`` on the meta device: nothing is computed, and no state changes."""
    twin = copy.deepcopy(model).to("meta")
    density: dict[int, float] = {}
    for weight in attached(twin):
        for tensor in (weight.dense, weight.projection.projected):
            density[_storage(tensor)] = weight.pattern.density
    batch = tuple(tensor.to("meta") for tensor in task.example())
    twin.train()
    with torch.random.fork_rng(devices=[]):
        with _Counter(density) as forward:
            loss = task.loss(twin, batch)
        with _Counter({}) as backward:
            loss.backward()
    items = task.size(batch)
    return Flops(forward.dense // items, round(forward.sparse / items), backward.dense // items)


class _Counter(TorchDispatchMode):
    """Adds up torch's own FLOP formulas; a product with a weight of known density counts that much."""

    def __init__(self, density: dict[int, float]) -> None:
        super().__init__()
        self.density, self.dense, self.sparse = density, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = formula(*args, **(kwargs or {}), out_val=out)
            self.dense += flops
            operands = [_storage(a) for a in tree_iter(args) if isinstance(a, Tensor)]
            self.sparse += flops * min((self.density.get(operand, 1.0) for operand in operands), default=1.0)
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the same for a weight and its transpose
