"""``nmrun ratios RUN``: a ratio for every layer of a trained model, and the command that trains with
them.

Imports torch only for a run that is there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError, refused
from nmrun.lab import consent
from nmrun.lab.arguments import Parser, in_range
from nmrun.lab.keys.config import flatten
from nmrun.lab.runs.run_folder import FINAL, RunFolder
from nmrun.patterns import Pattern
from nmrun.ranges import Check, number

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config
    from nmrun.papers.ratios.search import Costs, LayerTimes, Proposal

GROUPS = ("dataset", "model", "recipe", "optimizer", "schedule")

# since N is halved
POWER = Check("a power of two, 2 or more", lambda m: m >= 2 and not m & (m - 1))


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="nmrun ratios",
        description="Propose a ratio for each layer of a finished run's model. Of all choices within the budget it takes the "
        "one that keeps most of the squared weights.",
    )
    parser.add_argument(
        "run",
        type=Path,
        help="a run folder, dense as a rule (holds result.json and model.safetensors)",
    )
    parser.add_argument(
        "--budget",
        type=in_range(float, number(0, 1, open_low=True, open_high=True)),
        default=0.125,
        help="what the layers may cost, as a share of what they cost dense (default 0.125)",
    )
    parser.add_argument(
        "--m",
        type=in_range(int, POWER),
        default=16,
        help="M of all ratios, a power of two (default 16)",
    )
    parser.add_argument(
        "--cost",
        choices=("weights", "flops", "time"),
        default="weights",
        help="what the budget counts: weights (those kept; default), flops (of their products), or time (of the three products of a "
        "training step, measured on this machine at the run's batch)",
    )
    consent.consent_option(parser)
    options = parser.parse_args(argv)
    run = RunFolder(options.run)
    run.demand(options.run)
    consent.demand_consent(
        options.run, run.result["config"], options.yes, ("recipe", *consent.BUILT)
    )
    with refused("", ValueError):
        lines = _proposal_lines(run, options.budget, options.m, options.cost)
    print("\n".join(lines))
    return 0


def _proposal_lines(run: RunFolder, budget: float, m: int, cost: str) -> list[str]:
    import torch
    from omegaconf import OmegaConf
    from safetensors.torch import load_file

    from nmrun.lab import models, tasks
    from nmrun.lab.config import command_line, schema
    from nmrun.papers.ratios import search
    from nmrun.sparsity.select import select

    config = schema.check(OmegaConf.create(run.result["config"]))
    task = tasks.build(config, torch.device("cpu"))
    model = models.build(config.model.mapping(), task.inputs)
    model.load_state_dict(load_file(run.checked(FINAL)))
    limits: dict[str, Any] = {
        "include": config.model.include,
        "exclude": config.model.exclude,
    }
    config_dir = _config_dir(run) if consent.code_of(config.plain) else None
    words = _settings(config, config_dir)
    costs: Costs | None = None  # None: weights
    timed: LayerTimes | None = None
    if cost == "flops":
        names = [c.module_name for c in select(model, Pattern(1, m), **limits)[0]]
        costs = search.flops_by_layer(model, names, task, m)
    if cost == "time":
        plain = [*words, "trainer.budget=null"]  # how long it trains is no matter here
        timed = search.times_by_layer(
            lambda ratio: _composed([*plain, _sparsity_word(ratio)], config_dir), m
        )
        costs = timed.costs
    proposal = search.search_ratios(model, budget, m, costs, **limits)
    base = Pattern(min(max(1, round(proposal.density * m)), m - 1), m)
    ratios = ", ".join(
        f"{name}: {'dense' if r.n == r.m else r}" for name, r in proposal.ratios.items()
    )
    words += [_sparsity_word(base), f"sparsity.overrides={{{ratios}}}"]
    used = f"  {cost} {proposal.used:.3f} of dense, budget {budget:g}"
    if timed is not None:
        total = sum(layer_costs[m] for layer_costs in timed.costs.values())
        used += f" ({proposal.used * total:.3g} of {total:.3g} ms for a micro-batch)"
    return [*_table(proposal, timed), used, f"  {command_line.typed(config_dir, words)}"]


def _table(proposal: Proposal, timed: LayerTimes | None) -> list[str]:
    width = max(map(len, proposal.ratios))
    lines = []
    if timed is not None:
        lines.append(f"  {'layer':<{width}}  {'ratio':>7}  {'dense':>11}  {'sparse':>11}")
    for name, ratio in proposal.ratios.items():
        line = f"  {name:<{width}}  {ratio!s:>7}  "
        if timed is not None and name not in timed.costs:
            lines.append(
                f"{line}stays dense, not measured: {timed.reasons.get(name, 'the recipe leaves it')}"
            )
            continue
        if timed is not None:
            layer_costs = timed.costs[name]
            line += f"{layer_costs[ratio.m]:8.3f} ms  {layer_costs[ratio.n]:8.3f} ms  "
        lines.append(f"{line}keeps {proposal.shares[name]:.1%} of the squared weights")
    return lines


def _sparsity_word(ratio: Pattern) -> str:
    return f"sparsity={ratio}"


def _config_dir(run: RunFolder) -> str | None:
    """The folder of more configs that the run's command names, if it is known."""
    from nmrun.lab.config import command_line

    words = shlex.split(run.command or "nmrun")[1:]
    return command_line.options(words).config_dir


def _composed(words: Sequence[str], config_dir: str | None) -> Config:
    """The config of these words. ConfigError where the user's own data set or model is not found."""
    from nmrun.lab.config import command_line
    from nmrun.lab.config.composition import config_of

    with refused("its settings cannot be given in a command: ", ConfigError):
        return config_of(command_line.own_recipe(list(words), config_dir), config_dir)


def _settings(config: Config, config_dir: str | None) -> list[str]:
    """The overrides that give a new run this one's data, model, optimizer, schedule, trainer and
    seed, and its recipe; in the place of the dense one STEP, or SR-STE for want of Adam."""
    from nmrun.lab.config import command_line

    plain = dict(config.plain)
    if plain["recipe"]["name"] == "dense":
        adam = plain["optimizer"]["name"] in ("adam", "adamw")
        plain["recipe"] = {"name": "step" if adam else "sr_ste"}
    words = [f"{group}={plain[group]['name']}" for group in GROUPS]
    if own := consent.code_of(plain, ["recipe"]):
        words[GROUPS.index("recipe")] = f"recipe._target_={own[0]}"
    default = _composed(words, config_dir)
    for group in (*GROUPS, "trainer"):
        before = flatten(default.plain[group])
        words += [
            command_line.word(f"{group}.{k}", v)
            for k, v in flatten(plain[group]).items()
            if v != before.get(k)
        ]
    return [*words, f"seed={config.seed}"]
