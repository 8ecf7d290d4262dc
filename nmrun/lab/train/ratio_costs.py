"""What a layer costs at each ratio, for :mod:`nmrun.lab.train.ratio_search`: its FLOPs, or the measured
time of its products in training.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from nmrun.errors import ConfigError
from nmrun.fast.cpu import onednn
from nmrun.fast.measurement import ONEDNN, Choice
from nmrun.lab.keys.config import Config
from nmrun.lab.tasks.base import Task
from nmrun.lab.train import beforehand, flops
from nmrun.lab.train.build import Parts
from nmrun.lab.train.ratio_search import halved
from nmrun.patterns import Pattern
from nmrun.sparsity.select import candidates
from nmrun.sparsity.weight import SparseWeight

Costs = dict[str, dict[int, float]]  # by module name and N; N = M is dense


def flops_by_layer(model: nn.Module, names: Sequence[str], task: Task, m: int) -> Costs:
    """Count the FLOPs of layers' forward products.

    Args:
        model: the model.
        names: of the modules.
        task: the FLOPs are for one item of it.
        m: of the ratios.
    """
    every = Pattern(1, 1)
    found: Costs = {}
    for name in names:
        own = (c for c in candidates(model) if c.module_name == name)
        weights = [
            SparseWeight(c.module_name, c.module, c.attribute, every, c.dim, c.outputs) for c in own
        ]
        dense = sum(part.products.forward for part in flops.count(model, task, weights).sparse)
        found[name] = {n: dense * n / m for n in halved(m)}
    return found


@dataclass(frozen=True)
class Timed:
    """What was measured of layers.

    Attributes:
        costs: milliseconds of one micro-batch, dense's where a ratio is slower than that.
        left: by module name the reason why its products were not measured.
    """

    costs: Costs
    left: dict[str, str]


def times_by_layer(config_of: Callable[[Pattern], Config], m: int) -> Timed:
    """Measure the three products of layers in training, at every ratio, as a run would compute them
    here (:mod:`nmrun.fast.acceleration`), and the packing of their weights.

    The run is built with each ratio, and not trained. What has been measured on this machine before
    is taken from the cache of such times.

    Args:
        config_of: the config of the run with a ratio in all layers.
        m: of the ratios.

    Raises:
        ConfigError: where no product is measured, with the reasons.
    """
    dense: dict[str, list[float]] = defaultdict(list)  # by weight; measured beside each ratio
    sparse: dict[str, dict[int, float]] = defaultdict(dict)
    module: dict[str, str] = {}
    left: dict[str, str] = {}
    for n in halved(m)[1:]:
        config = config_of(Pattern(n, m))
        parts, *_ = beforehand.parts(config, None, config.trainer.accumulate, search=False)
        choices = {c.name: c for c in parts.accelerated if not c.always_dense}
        for weight in parts.handle.sparse:
            choice = choices.get(weight.name)
            module[weight.name] = weight.module_name
            if choice is None or not choice.times:
                left.setdefault(
                    weight.name, choice.reason if choice else "trainer.acceleration=off"
                )
                continue
            found = _milliseconds(choice, config, parts, weight)
            dense[weight.name].append(found[0])
            sparse[weight.name][n] = found[1]
    costs: Costs = {}
    for name, taken in dense.items():
        own = costs.setdefault(module[name], dict.fromkeys(halved(m), 0.0))
        whole = statistics.median(taken)
        for n in own:
            own[n] += min(whole, sparse[name].get(n, whole))
    left = {module[name]: why for name, why in left.items() if module[name] not in costs}
    if not costs:
        raise ConfigError(f"no layer's time is measured: {'; '.join(dict.fromkeys(left.values()))}")
    return Timed(costs, left)


def _milliseconds(
    choice: Choice, config: Config, parts: Parts, weight: SparseWeight
) -> tuple[float, float]:
    """What a layer takes dense, and by the path that it got."""
    times, trainer = choice.times, config.trainer
    without = times[ONEDNN if onednn.is_faster(times) else "dense"].dense
    if not choice.is_sparse:
        return without, without
    own = times[str(choice.path)]
    gradient = times[onednn.best_gradient(times)].weight_gradient
    recipe = parts.handle.recipe
    with recipe.at(parts.total_steps - 1):  # its sparse phase
        masked = recipe.masks_gradient(weight) and trainer.clip is None
    if masked or trainer.mvue is not None:
        gradient = min(gradient, own.weight_gradient)
    return without, own.step(trainer.accumulate) + gradient
