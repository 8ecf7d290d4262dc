"""Where a recipe's settings are looked for: the learning rate, and what the recipe's class declares.

A class declares it beside a hyperparameter's range: ``decay: Annotated[float, number(0),
log(1e-6, 1e-2)] = 2e-4``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep

from nmrun.config import command_line
from nmrun.config.recipe_fields import fields
from nmrun.errors import ConfigError
from nmrun.ranges import Search, among, between, log
from nmrun.recipes import RECIPES
from nmrun.settings.config import Config

RATE = "optimizer.lr"
AROUND = 5.0  # the learning rate is looked for from a fifth to five times the config's
Space = Mapping[str, Search]


def of(config: Config, given: Space) -> Space:
    """The search space of a run.

    Args:
        config: the run's config.
        given: search spaces by key, which win over those that the recipe declares.

    Returns:
        Search spaces by key: that of the learning rate, those of the recipe's hyperparameters that
        declare one, and those of ``given`` that the config has.
    """
    rate = config.optimizer.lr
    path = config.recipe.target or RECIPES[config.recipe.name]
    own = {f"recipe.{key}": field.search for key, field in fields(path).items() if field.search}
    found = {RATE: log(rate / AROUND, rate * AROUND), **own}
    return found | {key: search for key, search in given.items() if has(config, key)}


def has(config: Config, key: str) -> bool:
    """Whether a config has a key, such as ``recipe.decay``."""
    group, _, name = key.partition(".")
    return name in config.plain.get(group, {})


def read(words: Sequence[str]) -> Space:
    """Read search spaces.

    Args:
        words: as Hydra writes sweeps: ``optimizer.lr=tag(log,interval(1e-4,1e-2))``,
            ``recipe.final=interval(0.1,0.5)`` or ``recipe.switch=auto,0.2,0.5``.

    Returns:
        The search spaces by key.

    Raises:
        ConfigError: for words that say no interval and no list of values.
    """
    overrides, problems = command_line.parsed(words)
    found: dict[str, Search] = {}
    for override in overrides:
        value = override.value()
        if isinstance(value, IntervalSweep):
            ends = float(value.start or 0), float(value.end or 0)
            logarithmic = "log" in value.tags
            if ends[0] >= ends[1] or (logarithmic and ends[0] <= 0):
                problems.append(f"--over {override.input_line}: no such interval")
            found[override.key_or_group] = (log if logarithmic else between)(*ends)
        elif isinstance(value, ChoiceSweep):
            found[override.key_or_group] = among(*command_line.values(override, []))
        else:
            problems.append(
                f"--over {override.input_line}: it takes an interval or several values, as in "
                "'optimizer.lr=tag(log,interval(1e-4,1e-2))' or recipe.switch=auto,0.2,0.5"
            )
    if problems:
        raise ConfigError(problems)
    return found


def words(params: Mapping[str, Any]) -> list[str]:
    """Write what was found as overrides."""
    return [f"{key}={value}" for key, value in params.items()]
