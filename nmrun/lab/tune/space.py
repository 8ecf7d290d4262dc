"""Where a recipe's settings are looked for: the learning rate, and what the recipe's class declares.

A class declares it beside a hyperparameter's range: ``decay: Annotated[float, number(0),
log(1e-6, 1e-2)] = 2e-4``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep

from nmrun.errors import ConfigError
from nmrun.lab.keys.config import Config
from nmrun.lab.words import command_line
from nmrun.lab.words.recipe_fields import fields
from nmrun.ranges import Search, among, between, log
from nmrun.recipes import RECIPES

RATE = "optimizer.lr"
EDGE = 0.05  # of a range, where a value is said to lie at its end
AROUND = 5.0  # the learning rate is looked for from a fifth to five times the config's
Space = Mapping[str, Search]


def of(config: Config, given: Space) -> Space:
    """The search spaces of a run by key: that of the learning rate, those that the recipe declares,
    and those of ``given`` that the config has, which win.
    """
    rate = config.optimizer.lr
    path = config.recipe.target or RECIPES[config.recipe.name]
    declared = {
        f"recipe.{key}": field.search for key, field in fields(path).items() if field.search
    }
    searched = {RATE: log(rate / AROUND, rate * AROUND), **declared}
    return searched | {key: search for key, search in given.items() if has(config, key)}


def has(config: Config, key: str) -> bool:
    """Whether a config has a key, such as ``recipe.decay``."""
    group, _, name = key.partition(".")
    return name in config.plain.get(group, {})


def read(words: Sequence[str]) -> Space:
    """Search spaces by key, of words as Hydra writes sweeps:
    ``optimizer.lr=tag(log,interval(1e-4,1e-2))`` or ``recipe.switch=auto,0.2,0.5``.

    Raises:
        ConfigError: for words that say no interval and no list of values.
    """
    overrides, problems = command_line.parsed(words)
    spaces: dict[str, Search] = {}
    for override in overrides:
        value = override.value()
        if isinstance(value, IntervalSweep):
            ends = float(value.start or 0), float(value.end or 0)
            logarithmic = "log" in value.tags
            if ends[0] >= ends[1] or (logarithmic and ends[0] <= 0):
                problems.append(f"--over {override.input_line}: no such interval")
            spaces[override.key_or_group] = (log if logarithmic else between)(*ends)
        elif isinstance(value, ChoiceSweep):
            spaces[override.key_or_group] = among(*command_line.values(override, []))
        else:
            problems.append(
                f"--over {override.input_line}: it takes an interval or several values, as in "
                "'optimizer.lr=tag(log,interval(1e-4,1e-2))' or recipe.switch=auto,0.2,0.5"
            )
    if problems:
        raise ConfigError(problems)
    return spaces


def words(params: Mapping[str, Any]) -> list[str]:
    """Write what was found as overrides."""
    return [f"{key}={value}" for key, value in params.items()]


def at_edge(value: Any, search: Search) -> str:
    """Say at which end of a range a value lies: ``lower``, ``upper``, or nothing.

    At an end is what lies within a twentieth of the range from it (of the logarithms, where the
    range is looked through by them). A list of values has no ends.
    """
    if search.values:
        return ""
    low, high, at = (math.log(x) if search.log else x for x in (search.low, search.high, value))
    place = (at - low) / (high - low) if high > low else 0.5
    return "lower" if place < EDGE else "upper" if place > 1 - EDGE else ""


def wider(search: Search, end: str) -> str:
    """A range that goes on at its ``lower`` or ``upper`` end, as ``--over`` takes it; ``...`` where it
    is not known how far a setting may go.
    """
    if not search.log:
        return "..."
    low = search.low / AROUND if end == "lower" else search.low
    high = search.high * AROUND if end == "upper" else search.high
    return f"tag(log,interval({low:g},{high:g}))"
