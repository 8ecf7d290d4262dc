"""Layer-wise ratios under a budget: N for every layer, proposed for a trained model (``nmrun ratios``).

In the spirit of DominoSearch (Sun et al. 2021, NeurIPS): M is fixed, every layer starts dense (N =
M), and N is halved where it hurts least until the budget is met. DominoSearch finds out what hurts
by training with penalties for hours; here it is the share of a layer's squared weights that the
halving would prune, for each unit of cost that it saves. What the last halving saved too much goes
back to the layers that gain most. Each halving hurts more than the one before, so where the budget
is met exactly no other choice keeps more. Then train with the proposed ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.sparsity.candidates import by_group
from nmrun.sparsity.select import candidates, select
from nmrun.sparsity.weight import SparseWeight
from nmrun.tasks.base import Task


@dataclass(frozen=True)
class Proposal:
    """A ratio for every layer.

    Attributes:
        ratios: by module name; N = M means dense.
        kept: the share of squared weights that each layer keeps.
        density: over all.
    """

    ratios: dict[str, Pattern]
    kept: dict[str, float]
    density: float


@torch.no_grad()
def search_ratios(
    model: nn.Module,
    density: float,
    m: int = 16,
    costs: Mapping[str, float] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
) -> Proposal:
    """Choose N from m, m/2, m/4, ..., 1 for every layer that can hold groups of ``m``.

    Args:
        model: with trained weights.
        density: what may be left at most: the sum of cost * N / m over the sum of cost.
        m: a power of two.
        costs: by module name, such as FLOPs; None: the number of weights.
        include, exclude: which weights, as in :func:`nmrun.sparsify`.

    Raises:
        ConfigError: for a density that no choice reaches.
        ValueError: for an ``m`` that is no power of two.
    """
    if m < 2 or m & (m - 1):
        raise ValueError(f"m={m} must be a power of two, 2 or more: N is halved")
    if not 1 / m <= density < 1:
        raise ConfigError(
            f"density {density:g} cannot be had with M = {m}: from 1:{m}, which is {1 / m:g}, to below 1"
        )
    layers: dict[str, list[Tensor]] = {}  # by module, as overrides are; some have several weights
    for c in select(model, Pattern(1, m), include, exclude)[0]:
        layers.setdefault(c.module_name, []).append(
            by_group(c.tensor, Pattern(1, m), c.dim).reshape(-1, m)
        )
    if not layers:
        raise ConfigError(f"no layer of this model can hold groups of {m}")
    # energy[name][n]: the share of squared weights in the n largest of every group
    cost, energy = (
        {},
        {},
    )
    for name, weights in layers.items():
        groups = torch.cat(weights).double().square()
        cost[name] = float((costs or {}).get(name, groups.numel()))
        sums = groups.sort(dim=1, descending=True).values.sum(0).cumsum(0)
        energy[name] = [0.0, *(sums / sums[-1].clamp_min(torch.finfo(sums.dtype).tiny)).tolist()]
    n = dict.fromkeys(layers, m)
    total, most = sum(cost.values()), density * (1 + 1e-9)

    def used(more: str | None = None) -> float:
        return sum(cost[name] * n[name] * (2 if name == more else 1) / m for name in n) / total

    while used() > most:
        halved = [name for name in n if n[name] > 1]
        least = min(
            halved,
            key=lambda k: (energy[k][n[k]] - energy[k][n[k] // 2]) / (cost[k] * n[k] / (2 * m)),
        )
        n[least] //= 2
    while fitting := [name for name in n if n[name] < m and used(more=name) <= most]:
        n[max(fitting, key=lambda k: energy[k][2 * n[k]] - energy[k][n[k]])] *= 2
    ratios = {name: Pattern(count, m) for name, count in n.items()}
    return Proposal(ratios, {name: energy[name][count] for name, count in n.items()}, used())


def flops_by_layer(model: nn.Module, names: Sequence[str], task: Task) -> dict[str, float]:
    """Count the FLOPs of layers' forward products.

    Args:
        model: the model.
        names: of the modules.
        task: the FLOPs are for one item of it.
    """
    from nmrun.train import flops

    every = Pattern(1, 1)
    found: dict[str, float] = {}
    for name in names:
        own = (c for c in candidates(model) if c.module_name == name)
        weights = [
            SparseWeight(c.module_name, c.module, c.attribute, every, c.dim, c.outputs) for c in own
        ]
        found[name] = sum(p.forward for _, p in flops.count(model, task, weights).sparse)
    return found
