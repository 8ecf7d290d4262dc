"""Layer-wise ratios under a budget: N for every layer, proposed for a trained model (``nmrun ratios``).

The question is DominoSearch's (Sun et al. 2021, NeurIPS): M is fixed, and which N, of M, M/2, ...
and 1, has each layer? DominoSearch finds out what hurts by training with penalties for hours; here
it is the share of a layer's squared weights that is pruned. Of all choices within the budget the
one is taken whose kept shares, added over the layers, are most. Then train with these ratios.

That is a multiple-choice knapsack (Kellerer, Pferschy and Pisinger 2004, Knapsack Problems, chapter
11), solved by dynamic programming over the layers. Its list has the choices for the layers so far.
None of them costs more and keeps less than another (Nemhauser and Ullmann 1969).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab.tasks.base import Task
from nmrun.lab.train import flops
from nmrun.patterns import Pattern
from nmrun.sparsity.reference import by_group
from nmrun.sparsity.select import candidates, select
from nmrun.sparsity.weight import SparseWeight

# Entries of the list of choices. A longer one is thinned to one for each of so many parts of the
# budget, so that what is found is the best for a budget that is smaller by at most one of these
# parts for each layer.
LONGEST = 50_000


@dataclass(frozen=True)
class Proposal:
    """A ratio for every layer, by module name; N = M means dense.

    Attributes:
        shares: the share of squared weights that each layer keeps.
        used: the cost over all, as a share of what the layers cost dense.
        density: the kept weights over all, as a share of all weights of these layers.
    """

    ratios: dict[str, Pattern]
    shares: dict[str, float]
    used: float
    density: float


def search_ratios(
    model: nn.Module,
    budget: float,
    m: int = 16,
    costs: Mapping[str, float] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
) -> Proposal:
    """Choose N from m, m/2, m/4, ..., 1, m a power of two, for every layer that can hold groups of
    ``m``.

    ``budget`` is a share of what the layers cost dense: ``costs``, by module name, of which a ratio takes
    the share N/M. None: their weights. ConfigError for a budget that no choice holds, with the least that
    can be had.
    """
    squares = squared_groups(model, m, include, exclude)
    if not squares:
        raise ConfigError(f"no layer of this model can hold groups of {m}")
    if not 1 / m <= budget < 1:
        raise ConfigError(f"budget {budget:g}: with M = {m} it is from {1 / m:g} to below 1")
    options = [m >> times for times in range(m.bit_length())]
    sizes = {name: groups.numel() for name, groups in squares.items()}
    kept = {name: shares(groups, options) for name, groups in squares.items()}
    costs = costs or sizes
    dense = sum(costs[name] for name in squares)
    prices = [[costs[name] * n / m for n in options] for name in squares]
    selection = best_choice(prices, [*kept.values()], budget * dense * (1 + 1e-9))
    n = {name: options[place] for name, place in zip(squares, selection, strict=True)}
    return Proposal(
        {name: Pattern(count, m) for name, count in n.items()},
        {name: kept[name][place] for name, place in zip(squares, selection, strict=True)},
        sum(costs[name] * count / m for name, count in n.items()) / dense,
        sum(sizes[name] * count / m for name, count in n.items()) / sum(sizes.values()),
    )


def best_choice(
    costs: Sequence[Sequence[float]], gains: Sequence[Sequence[float]], most: float
) -> list[int]:
    """Choose one option for each layer: the largest sum of gains of all whose costs add up to
    ``most`` at most; of equal ones the cheapest. The cheapest choice costs no more than
    ``most``."""
    spent, gained = np.zeros(1), np.zeros(1)  # the list, from the cheapest to what gains most
    cheapest_rest = sum(map(min, costs))
    orders: list[NDArray[np.intp]] = []
    for cost, gain in zip(costs, gains, strict=True):
        cheapest_rest -= min(cost)
        total, value = np.add.outer(spent, cost).ravel(), np.add.outer(gained, gain).ravel()
        order = np.lexsort((-value, total))
        order = order[total[order] + cheapest_rest <= most]
        highest = np.maximum.accumulate(value[order])
        order = order[np.append(True, highest[1:] > highest[:-1])]
        if len(order) > LONGEST:
            part = (total[order] * (LONGEST / most)).astype(int)
            order = order[np.append(part[1:] != part[:-1], True)]
        orders.append(order)
        spent, gained = total[order], value[order]
    selection, place = list[int](), len(spent) - 1
    for order, cost in zip(reversed(orders), reversed(costs), strict=True):
        place, option = divmod(int(order[place]), len(cost))
        selection.append(option)
    return selection[::-1]


@torch.no_grad()
def squared_groups(
    model: nn.Module,
    m: int,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
) -> dict[str, Tensor]:
    """The squared weights (groups, ``m``) of each layer that can hold groups, by module name."""
    weights: dict[str, list[Tensor]] = {}  # by module, as overrides are; some have several weights
    for c in select(model, Pattern(1, m), include, exclude)[0]:
        weights.setdefault(c.module_name, []).append(
            by_group(c.parameter, Pattern(1, m), c.dim).reshape(-1, m)
        )
    return {name: torch.cat(tensors).double().square() for name, tensors in weights.items()}


def shares(groups: Tensor, options: Sequence[int]) -> list[float]:
    """The share of the squares (groups, m) that the n largest of every group have, for each n."""
    sums = groups.sort(dim=1, descending=True).values.sum(0).cumsum(0)
    of_all: list[float] = (sums / sums[-1].clamp_min(torch.finfo(sums.dtype).tiny)).tolist()
    return [of_all[n - 1] for n in options]


def flops_by_layer(model: nn.Module, names: Sequence[str], task: Task) -> dict[str, float]:
    """What each layer's forward product costs dense."""
    costs: dict[str, float] = {}
    for name in names:
        weights = [
            SparseWeight(replace(c, pattern=Pattern(1, 1)))
            for c in candidates(model)
            if c.module_name == name
        ]
        costs[name] = sum(p.products.forward for p in flops.count(model, task, weights).sparse)
    return costs
