"""``nmrun ratios RUN``: a ratio for every layer of a trained model, and the command that trains with
them.

Imports torch only for a run that is there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError
from nmrun.lab import arguments
from nmrun.lab.arguments import Parser, in_range
from nmrun.lab.runs.run_folder import FINAL, RunFolder
from nmrun.oneshot import METHODS
from nmrun.patterns import Pattern
from nmrun.ranges import Check, number

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
        choices=("weights", "flops"),
        default="weights",
        help="what the budget counts: weights (those kept; default), or flops (of their forward products)",
    )
    arguments.consent_option(parser)
    options = parser.parse_args(argv)
    run = RunFolder(options.run)
    run.demand(options.run)
    if run.result["config"]["recipe"].get("name") in METHODS:
        raise ConfigError(f"{options.run} was pruned in one shot; name the run that it began with")
    groups = ("recipe", *arguments.BUILT)
    arguments.demand_consent(options.run, run.result["config"], options.yes, groups)
    print("\n".join(_proposal_lines(run, options.budget, options.m, options.cost)))
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
    limits: dict[str, Any] = {"include": config.model.include, "exclude": config.model.exclude}
    costs: dict[str, float] | None = None  # None: weights
    if cost == "flops":
        names = [c.module_name for c in select(model, Pattern(1, m), **limits)[0]]
        costs = search.flops_by_layer(model, names, task)
    proposal = search.search_ratios(model, budget, m, costs, **limits)
    width = max(map(len, proposal.ratios))
    base = min(max(1, round(proposal.density * m)), m - 1)
    ratios = ", ".join(
        f"{name}: {'dense' if ratio.n == ratio.m else ratio}"
        for name, ratio in proposal.ratios.items()
    )
    # the run's own command without its ratio
    words, gone = shlex.split(run.command or "nmrun")[1:], ["sparsity", "sparsity.overrides"]
    sparsity = [f"sparsity={base}:{m}", f"sparsity.overrides={{{ratios}}}"]
    if config.recipe.name == "dense":  # STEP, or SR-STE for want of Adam
        adam = config.optimizer.name in ("adam", "adamw")
        gone, sparsity = [*gone, "recipe"], [f"recipe={'step' if adam else 'sr_ste'}", *sparsity]
    words = [word for word in words if command_line.key(word) not in gone]
    return [
        *(
            f"  {name:<{width}}  {ratio!s:>7}  keeps {proposal.shares[name]:.1%} of the squared weights"
            for name, ratio in proposal.ratios.items()
        ),
        f"  {cost} {proposal.used:.3f} of dense, budget {budget:g}",
        f"  {shlex.join(['nmrun', *words, *sparsity])}",
    ]
