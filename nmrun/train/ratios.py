"""``nmrun ratios RUN``: a ratio for every layer of a trained model, and the command that trains with
them.

Imports torch only for a run that is there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.verbs import Parser

if TYPE_CHECKING:
    from nmrun.settings.config import Config

GROUPS = ("dataset", "model", "recipe", "optimizer", "schedule")


def main(argv: Sequence[str]) -> int:
    """Print the ratios and the command; returns the exit status."""
    parser = Parser(
        prog="nmrun ratios",
        description="Propose layer-wise ratios for the model of a finished run.",
    )
    parser.add_argument(
        "run",
        type=Path,
        help="a run folder, dense as a rule (holds config.yaml and model.safetensors)",
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.125,
        help="what is left of the sparse layers' cost (default 0.125)",
    )
    parser.add_argument(
        "--m", type=int, default=16, help="M of all ratios, a power of two (default 16)"
    )
    parser.add_argument(
        "--cost",
        choices=("weights", "flops"),
        default="weights",
        help="what the density is of (default weights)",
    )
    options = parser.parse_args(argv)
    if options.m < 2 or options.m & (options.m - 1):
        raise ConfigError(f"--m {options.m}: a power of two, 2 or more, since N is halved")
    if not 1 / options.m <= options.density < 1:
        least = f"from {1 / options.m:g}, which is 1:{options.m}, to below 1"
        raise ConfigError(f"--density {options.density:g} with --m {options.m}: {least}")
    for name in ("config.yaml", "model.safetensors"):
        if not (options.run / name).is_file():
            raise ConfigError(f"{options.run} holds no finished run: there is no {name}")
    import torch
    from omegaconf import OmegaConf
    from safetensors.torch import load_file

    from nmrun import models, tasks
    from nmrun.config import schema
    from nmrun.config.identity import completed
    from nmrun.sparsity.select import select
    from nmrun.train.ratio_search import flops_by_layer, search_ratios

    try:
        saved: Any = OmegaConf.to_container(OmegaConf.load(options.run / "config.yaml"))
        # a run has one seed
        config = schema.check(OmegaConf.create({"seeds": None, **completed(saved)}))
        task = tasks.build(config, torch.device("cpu"))
        model = models.build(config.model.mapping(), task.inputs)
        model.load_state_dict(load_file(options.run / "model.safetensors"))
        limits: dict[str, Any] = {
            "include": config.model.include,
            "exclude": config.model.exclude or (),
        }
        names = [c.module_name for c in select(model, Pattern(1, options.m), **limits)[0]]
        costs = flops_by_layer(model, names, task) if options.cost == "flops" else None
        proposal = search_ratios(model, options.density, options.m, costs, **limits)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    width = max(map(len, proposal.ratios))
    for name, ratio in proposal.ratios.items():
        print(
            f"  {name:<{width}}  {ratio!s:>7}  keeps {proposal.kept[name]:.1%} of the squared weights"
        )
    print(f"  density {proposal.density:.3f} of {options.cost}")
    ratios = ", ".join(
        f"{name}: {'dense' if r.n == r.m else r}" for name, r in proposal.ratios.items()
    )
    base = Pattern(max(1, round(options.density * options.m)), options.m)
    words = [*_settings(config), f"sparsity={base}", f"sparsity.overrides={{{ratios}}}"]
    print(f"  nmrun {' '.join(map(shlex.quote, words))}")
    return 0


def _settings(config: Config) -> list[str]:
    """The overrides that give a new run this one's data, model, optimizer, schedule, trainer and
    seed, and its recipe; in the place of the dense one STEP, or SR-STE for want of Adam.
    """
    from hydra import compose

    from nmrun.config import schema, source
    from nmrun.config.composing import composing

    source.register()
    plain = dict(config.plain)
    if plain["recipe"]["name"] == "dense":
        adam = plain["optimizer"]["name"] in ("adam", "adamw")
        plain["recipe"] = {"name": "step" if adam else "sr_ste"}
    words = [f"{group}={plain[group]['name']}" for group in GROUPS]
    with composing():
        default = schema.check(compose("nmrun", words))
    for group in (*GROUPS, "trainer"):
        before = schema.flatten(default.plain[group])
        words += [
            f"{group}.{k}={_word(v)}"
            for k, v in schema.flatten(plain[group]).items()
            if v != before.get(k)
        ]
    return [*words, f"seed={config.seed}"]


def _word(value: Any) -> str:
    """A value as Hydra reads it: texts are quoted, but where they are plain words."""
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_][\w./-]*", value) else f'"{value}"'
    return json.dumps(value)
