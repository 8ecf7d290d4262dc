"""Layer-wise ratios under a budget: N for every layer, proposed for a trained model (``nmrun ratios``).

The question is DominoSearch's (Sun et al. 2021, NeurIPS): M is fixed, and which N, of M, M/2, ...
and 1, has each layer? DominoSearch finds out what hurts by training with penalties for hours; here
it is the share of a layer's squared weights that is pruned. Of all choices within the budget the
one is taken whose kept shares, added over the layers, are most. Then train with these ratios.

That is a multiple-choice knapsack (Kellerer, Pferschy and Pisinger 2004, Knapsack Problems, chapter
11), solved by dynamic programming over the layers. Its list has the choices for the layers so far.
None of them costs more and keeps less than another (Nemhauser and Ullmann 1969). So costs need not
fall evenly with N, as measured times do not.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.fast.cpu import onednn
from nmrun.fast.measurement import ONEDNN, Choice, is_faster
from nmrun.lab.keys.config import Config
from nmrun.lab.tasks.base import Task
from nmrun.lab.train import flops
from nmrun.lab.train.build import Parts, build
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
    costs: Mapping[str, Mapping[int, float]] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
) -> Proposal:
    """Choose N from m, m/2, m/4, ..., 1, m a power of two, for every layer that can hold groups of
    ``m``.

    ``budget`` is a share of what the layers cost dense. ``costs``: what a layer costs, by module
    name and N, N = ``m`` included; others stay dense. None: the number of weights that are kept.
    ConfigError for a budget that no choice holds, with the least that can be had.
    """
    layers = layer_shares(model, m, include, exclude)
    if not layers:
        raise ConfigError(f"no layer of this model can hold groups of {m}")
    if costs is None:
        costs = {
            name: {n: float(n * layer.groups) for n in layer.shares}
            for name, layer in layers.items()
        }
    names = [name for name in layers if name in costs]
    options = [list(layers[name].shares) for name in names]
    prices = [[costs[name][n] for n in ns] for name, ns in zip(names, options, strict=True)]
    gains = [[layers[name].shares[n] for n in ns] for name, ns in zip(names, options, strict=True)]
    dense = sum(costs[name][m] for name in names)
    least = sum(map(min, prices)) / dense if dense else 1.0
    if least >= 1:
        raise ConfigError(f"no ratio with M = {m} costs less than dense")
    if not least * (1 - 1e-9) <= budget < 1:
        minimum = math.ceil(1e4 * least) / 1e4
        raise ConfigError(f"budget {budget:g}: with M = {m} it is from {minimum:g} to below 1")
    selection = best_choice(prices, gains, budget * dense * (1 + 1e-9))
    n = dict.fromkeys(layers, m)
    n |= {name: ns[place] for name, ns, place in zip(names, options, selection, strict=True)}
    return Proposal(
        {name: Pattern(count, m) for name, count in n.items()},
        {name: layers[name].shares[count] for name, count in n.items()},
        sum(costs[name][n[name]] for name in names) / dense,
        sum(layer.groups * n[name] for name, layer in layers.items())
        / sum(layer.groups * m for layer in layers.values()),
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


@dataclass(frozen=True)
class LayerShares:
    """The number of a layer's groups, and by N the share of its squared weights that it keeps."""

    groups: int
    shares: dict[int, float]


@torch.no_grad()
def layer_shares(
    model: nn.Module,
    m: int,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
) -> dict[str, LayerShares]:
    weights: dict[str, list[Tensor]] = {}  # by module, as overrides are; some have several weights
    for c in select(model, Pattern(1, m), include, exclude)[0]:
        weights.setdefault(c.module_name, []).append(
            by_group(c.parameter, Pattern(1, m), c.dim).reshape(-1, m)
        )
    layers = {}
    for name, tensors in weights.items():
        groups = torch.cat(tensors).double().square()
        # of the n largest of every group
        sums = groups.sort(dim=1, descending=True).values.sum(0).cumsum(0)
        shares = (sums / sums[-1].clamp_min(torch.finfo(sums.dtype).tiny)).tolist()
        layers[name] = LayerShares(len(groups), {n: shares[n - 1] for n in halved(m)})
    return layers


def halved(m: int) -> list[int]:
    """m, m/2, m/4, ..., 1; ValueError for an ``m`` that is no power of two."""
    if m < 2 or m & (m - 1):
        raise ValueError(f"m={m} must be a power of two, 2 or more: N is halved")
    return [m >> times for times in range(m.bit_length())]


Costs = dict[str, dict[int, float]]  # by module name and N; N = M is dense


def flops_by_layer(model: nn.Module, names: Sequence[str], task: Task, m: int) -> Costs:
    every = Pattern(1, 1)
    costs: Costs = {}
    for name in names:
        weights = [
            SparseWeight(replace(c, pattern=every))
            for c in candidates(model)
            if c.module_name == name
        ]
        dense = sum(part.products.forward for part in flops.count(model, task, weights).sparse)
        costs[name] = {n: dense * n / m for n in halved(m)}
    return costs


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of one micro-batch, dense's where a ratio is slower; in ``reasons``, by
    module name, why a layer was not measured."""

    costs: Costs
    reasons: dict[str, str]


def times_by_layer(config_of: Callable[[Pattern], Config], m: int) -> LayerTimes:
    """Measure the three products of layers in training, at every ratio, as a run would compute them
    here (:mod:`nmrun.fast.acceleration`), and the packing of their weights.

    The run is built with each ratio by ``config_of``, and not trained. What has been measured on
    this machine before is taken from the cache. ConfigError where nothing is measured.
    """
    dense: dict[str, list[float]] = defaultdict(list)  # by weight; measured beside each ratio
    sparse: dict[str, dict[int, float]] = defaultdict(dict)
    module: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for n in halved(m)[1:]:
        config = config_of(Pattern(n, m))
        parts = build(config)
        choices = {c.name: c for c in parts.accelerated if not c.always_dense}
        for weight in parts.handle.sparse:
            choice = choices.get(weight.name)
            module[weight.name] = weight.module_name
            if choice is None or not choice.times:
                reasons.setdefault(
                    weight.name, choice.reason if choice else "trainer.acceleration=off"
                )
                continue
            dense_time, sparse[weight.name][n] = _milliseconds(choice, config, parts, weight)
            dense[weight.name].append(dense_time)
    costs: Costs = {}
    for name, milliseconds in dense.items():
        totals = costs.setdefault(module[name], dict.fromkeys(halved(m), 0.0))
        whole = statistics.median(milliseconds)
        for n in totals:
            totals[n] += min(whole, sparse[name].get(n, whole))
    reasons = {module[name]: why for name, why in reasons.items() if module[name] not in costs}
    if not costs:
        raise ConfigError(
            f"no layer's time is measured: {'; '.join(dict.fromkeys(reasons.values()))}"
        )
    return LayerTimes(costs, reasons)


def _milliseconds(
    choice: Choice, config: Config, parts: Parts, weight: SparseWeight
) -> tuple[float, float]:
    """What a layer takes dense, and by the path that it got."""
    times, trainer = choice.times, config.trainer
    without = times[ONEDNN if is_faster(times, ONEDNN) else "dense"].dense
    if not choice.is_sparse:
        return without, without
    timing = times[str(choice.path)]
    gradient = times[onednn.best_gradient(times)].weight_gradient
    recipe = parts.handle.recipe
    with recipe.at(parts.total_steps - 1):  # its sparse phase
        masked = recipe.masks_gradient(weight) and trainer.clip is None
    if masked or trainer.mvue is not None:
        gradient = min(gradient, timing.weight_gradient)
    return without, timing.step(trainer.accumulate) + gradient
