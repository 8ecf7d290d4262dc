"""Layer-wise ratios under a budget: ``nmrun search RUN --density 0.125`` reads a trained model and proposes N for every layer.

In the spirit of DominoSearch (Sun et al. 2021, NeurIPS): M is fixed, every layer starts dense (N = M), and N is halved where it hurts least
until the budget is met. DominoSearch finds out what hurts by training with penalties for hours; here it is the share of a layer's
squared weights that the halving would prune, for each unit of cost that it saves. Then train with the proposed ratios.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.sparsity.candidates import by_group
from nmrun.sparsity.select import select
from nmrun.tasks.base import Task


@dataclass(frozen=True)
class Proposal:
    """``ratios`` by module name (N = M means dense), with the share of squared weights each layer keeps, and the density over all."""

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
    """Choose N from m, m/2, m/4, ..., 1 for every layer that can hold groups of ``m`` (a power of two), so that at most ``density`` is left.

    ``density`` is the sum of cost * N / m over the sum of cost of these layers; ``costs`` by module name (such as FLOPs) is the
    number of weights by default. ``include`` and ``exclude`` as in :func:`nmrun.sparsify`. Raises ConfigError for a density that no
    choice reaches, and ValueError for an m that is no power of two.
    """
    if m < 2 or m & (m - 1):
        raise ValueError(f"m={m} must be a power of two, 2 or more: N is halved")
    if not 1 / m <= density <= 1:
        raise ConfigError(f"density {density:g} cannot be had with M = {m}: from 1:{m}, which is {1 / m:g}, to 1")
    layers = {c.module_name: c for c in select(model, Pattern(1, m), include, exclude)[0]}
    if not layers:
        raise ConfigError(f"no layer of this model can hold groups of {m}")
    cost = {name: float((costs or {}).get(name, layer.tensor.numel())) for name, layer in layers.items()}
    energy = {}  # energy[name][n]: the share of squared weights in the n largest of every group
    for name, layer in layers.items():
        groups = by_group(layer.tensor, Pattern(1, m), layer.dim).double().square().reshape(-1, m)
        sums = groups.sort(dim=1, descending=True).values.sum(0).cumsum(0)
        energy[name] = [0.0, *(sums / sums[-1].clamp_min(torch.finfo(sums.dtype).tiny)).tolist()]
    n = dict.fromkeys(layers, m)
    total = sum(cost.values())

    def used() -> float:
        return sum(cost[name] * n[name] / m for name in n) / total

    while used() > density * (1 + 1e-9):
        halved = [name for name in n if n[name] > 1]
        least = min(halved, key=lambda k: (energy[k][n[k]] - energy[k][n[k] // 2]) / (cost[k] * n[k] / (2 * m)))
        n[least] //= 2
    ratios = {name: Pattern(count, m) for name, count in n.items()}
    return Proposal(ratios, {name: energy[name][count] for name, count in n.items()}, used())


def flops_by_layer(model: nn.Module, names: Sequence[str], task: Task) -> dict[str, float]:
    """The FLOPs of each layer's forward product, for one item of the task."""
    from nmrun import flops, sparsify

    found: dict[str, float] = {}
    for name in names:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        handle = sparsify(model, optimizer, "ste", "1:1", include=re.escape(name))
        found[name] = sum(p.forward for p in flops.count(model, task).sparse.values())
        handle.finalize()
    return found


def main(argv: Sequence[str]) -> int:
    """``nmrun search RUN``: print a ratio for every layer, and the overrides that train with them."""
    parser = argparse.ArgumentParser(
        prog="nmrun search", description="Propose layer-wise ratios for the model of a finished run."
    )
    parser.add_argument("run", type=Path, help="a run folder, dense as a rule (holds config.yaml and model.safetensors)")
    parser.add_argument("--density", type=float, default=0.125, help="what is left of the sparse layers' cost (default 0.125)")
    parser.add_argument("--m", type=int, default=16, help="M of all ratios, a power of two (default 16)")
    parser.add_argument(
        "--cost", choices=("weights", "flops"), default="weights", help="what the density is of (default weights)"
    )
    options = parser.parse_args(argv)
    from omegaconf import DictConfig, OmegaConf
    from safetensors.torch import load_file

    from nmrun import models, schema, tasks

    try:
        config = schema.check(DictConfig(OmegaConf.to_container(OmegaConf.load(options.run / "config.yaml"))))
        task = tasks.build(config, torch.device("cpu"))
        model = models.build(config.model, task.inputs)
        model.load_state_dict(load_file(options.run / "model.safetensors"))
        limits = {"include": config.model["include"], "exclude": config.model["exclude"] or ()}
        names = [c.module_name for c in select(model, Pattern(1, options.m), **limits)[0]]
        costs = flops_by_layer(model, names, task) if options.cost == "flops" else None
        proposal = search_ratios(model, options.density, options.m, costs, **limits)
    except OSError as error:
        print(f"nmrun search: {options.run} holds no finished run ({error.strerror}: {error.filename})", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"nmrun search: {error}", file=sys.stderr)
        return 2
    width = max(map(len, proposal.ratios))
    for name, ratio in proposal.ratios.items():
        print(f"  {name:<{width}}  {ratio!s:>7}  keeps {proposal.kept[name]:.1%} of the squared weights")
    print(f"  density {proposal.density:.3f} of {options.cost}")
    ratios = ", ".join(f"{name}: {'dense' if r.n == r.m else r}" for name, r in proposal.ratios.items())
    base = Pattern(max(1, round(options.density * options.m)), options.m)
    print(f"  nmrun sparsity={base} 'sparsity.overrides={{{ratios}}}'")
    return 0
