"""The plan of a comparison of tuned recipes: its cells, what each searches, and the number of runs.

A cell is what a table shows: one recipe at one ratio, and one value of every other key that is
swept. Searched are the learning rate, and what the recipe's class declares beside a hyperparameter's
range: ``decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 2e-4``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override

from nmrun.errors import ConfigError, raise_all, refused
from nmrun.lab.compare.notation import label
from nmrun.lab.config import command_line, suggestions
from nmrun.lab.config.composition import Cache, config_of
from nmrun.lab.config.identity import identity
from nmrun.lab.config.precheck import Job
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config, flatten
from nmrun.lab.keys.options import Field, recipe_facts
from nmrun.lab.output import quantity
from nmrun.lab.tune.study import AGAIN, FINALISTS, SEED
from nmrun.ranges import Check, Search, among, between, log
from nmrun.recipes import RECIPES

RATE = "optimizer.lr"
AROUND = 5.0  # the learning rate is searched from a fifth of the config's to five times it
EDGE = 0.05  # a value this near to an end of a range, as a share of it, lies at that end
TAKES = (
    "it takes an interval or several values for a key of a group, as in "
    "'optimizer.lr=tag(log,interval(1e-4,1e-2))', where log is for values above 0, or "
    "recipe.switch=auto,0.2,0.5"
)
Space = Mapping[str, Search]


@dataclass
class TuningCell:
    """One recipe at one ratio.

    Attributes:
        words: its overrides, without a seed.
        config: before tuning.
        searched: the search spaces by key.
        seeds: those that are reported.
    """

    words: list[str]
    config: Config
    searched: Space
    config_dir: str | None
    seeds: list[int] = field(default_factory=list)
    name: str = ""
    folder: Path = Path()

    @property
    def defaults(self) -> dict[str, Any]:
        values = settings(self.config)
        return {key: values[key] for key in self.searched}

    def with_settings(self, params: Iterable[tuple[str, Any]]) -> list[str]:
        """The overrides of a run with these values of searched keys."""
        words = [*self.words, *(command_line.word(key, value) for key, value in params)]
        return command_line.own_recipe(words, self.config_dir)

    def edge(self, key: str, value: Any) -> str:
        """At which end of its range a searched value lies, as :func:`at_edge`; nothing where the key
        takes no value beyond that end."""
        search, check = self.searched[key], _check_of(self.config, key)
        ends = {
            "lower": math.nextafter(search.low, -math.inf),
            "upper": math.nextafter(search.high, math.inf),
        }
        end = at_edge(value, search)
        return end if end and (check is None or check.holds(ends[end])) else ""


def cells(
    folder: Path, jobs: Sequence[Job], space: Space, config_dir: str | None = None
) -> list[TuningCell]:
    """The cells of a comparison in the order of its jobs; dense runs, which have no ratio, are
    one. ``space`` wins over the recipes' own search spaces.

    ConfigError for a key of ``space`` that no cell has, or whose values change no run, or with a value
    that a cell does not take, and for several values of a searched key.
    """
    by_identity: dict[str, TuningCell] = {}
    cache: Cache = {}
    for words, asked in jobs:
        bare = [word for word in words if command_line.key(word) != "seed"]
        config = config_of([*bare, f"seed={SEED}"], config_dir, cache)
        new = TuningCell(bare, config, space_of(config, space), config_dir)
        cell = by_identity.setdefault(identity(config), new)
        if asked.seed not in cell.seeds:
            cell.seeds.append(asked.seed)
    every = [*by_identity.values()]
    _name(every)
    places = ["".join(c if c.isalnum() or c in "._" else "-" for c in cell.name) for cell in every]
    for (cell_id, cell), place in zip(by_identity.items(), places, strict=True):
        cell.folder = folder / (place if places.count(place) == 1 else f"{place}-{cell_id}")
        idle = [key for key in space.keys() & cell.searched if not _changes(cell, key, cache)]
        cell.searched = {key: each for key, each in cell.searched.items() if key not in idle}
    there = {key for cell in every for key in (*cell.config.plain, *settings(cell.config))}
    for key in space:
        if key not in there:
            raise ConfigError(f"--over {suggestions.line(key, there)}")
        if not any(key in cell.searched for cell in every):
            raise ConfigError(f"--over {key}: its values change no run of this comparison")
    return every


def _name(every: Sequence[TuningCell]) -> None:
    """Name cells by recipe, ratio, and the values of the other swept keys. A recipe's settings are
    among them if only they tell its cells apart. ConfigError for several values of a searched key."""
    flats = [flatten(cell.config.plain) for cell in every]
    of_recipe = ("recipe.", "sparsity.")
    swept = _differing([{k: v for k, v in f.items() if not k.startswith(of_recipe)} for f in flats])
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, (cell, flat) in enumerate(zip(every, flats, strict=True)):
        ratio = "" if cell.config.pattern is None else str(cell.config.pattern)
        values = (str(flat[key]) for key in swept if key in flat)
        alike.setdefault((cell.config.recipe.name, ratio, *values), []).append(number)
    there: dict[tuple[str, ...], str] = {}
    for named, numbers in alike.items():
        more = _differing([flats[number] for number in numbers])
        for number in numbers:
            cell, flat = every[number], flats[number]
            cell.name = " ".join(filter(None, [*named, *(str(flat.get(key)) for key in more)]))
            free = [key for key in (*swept, *more) if key not in cell.searched]
            tells = (*named[:2], *(f"{key}={flat.get(key)}" for key in free))
            if there.setdefault(tells, cell.name) != cell.name:
                key = next(key for key in (*swept, *more) if key in cell.searched)
                raise ConfigError(
                    f"{key} has several values, and is searched in {cell.searched[key]}; give it one"
                )


def _differing(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ; of a group whose option differs, that alone."""
    keys = dict.fromkeys(key for flat in flats for key in flat)
    differing = [key for key in keys if len({repr(flat.get(key)) for flat in flats}) > 1]
    named = {key.partition(".")[0] for key in differing if key.endswith(".name")}
    return [key for key in differing if key.partition(".")[0] not in named or key.endswith(".name")]


def _changes(cell: TuningCell, key: str, cache: Cache) -> bool:
    """Whether the values that are searched make different runs of a cell. ConfigError for a value that
    the key does not take, and for one that stands for another."""
    search, runs, others = cell.searched[key], set(), []
    for value in search.values or (search.low, search.high):
        with refused("--over ", ConfigError):
            config = config_of(cell.with_settings([(key, value)]), cell.config_dir, cache)
        runs.add(identity(config))
        if (has := flatten(config.plain)[key]) != value:
            others.append(f"--over {key}={label(value)} stands for {label(has)}; name that")
    if len(runs) > 1:
        raise_all(others)
    return len(runs) > 1


def summary(cells: Sequence[TuningCell], trials: int) -> list[str]:
    """The cells, what is searched in each and in which range, and the number of runs."""
    width = max(len(cell.name) for cell in cells)
    lines = [f"  {cell.name:<{width}}  {space_text(cell.searched)}" for cell in cells]
    seeds, repeats = sum(len(cell.seeds) for cell in cells), min(trials, FINALISTS) * len(AGAIN)
    lines.append(
        f"  {quantity(len(cells), 'cell')}, in each {quantity(trials, 'trial')} and {repeats} repeats of "
        f"the best; {quantity(seeds, 'run')} of seeds: {len(cells) * (trials + repeats) + seeds} runs"
    )
    return lines


# --- search spaces --------------------------------------------------------------------------------


def space_of(config: Config, space: Space) -> Space:
    """The search spaces of a run by key: of the learning rate, those that the recipe declares, and
    those of ``space`` that the config has, which win. Dense training has no ratio."""
    rate = config.optimizer.lr
    declared = {key: field.search for key, field in _of_recipe(config).items() if field.search}
    searched = {RATE: log(rate / AROUND, rate * AROUND), **declared}
    has = settings(config)
    ours = {key: search for key, search in space.items() if key in has}
    if config.is_dense:
        ours = {key: search for key, search in ours.items() if not key.startswith("sparsity.")}
    return searched | ours


def settings(config: Config) -> dict[str, Any]:
    """The values of a run by key, with the defaults that a recipe of one's own need not name."""
    defaults = {key: field.default for key, field in _of_recipe(config).items()}
    return defaults | flatten(config.plain)


def _check_of(config: Config, key: str) -> Check | None:
    group, _, leaf = key.partition(".")
    fields = options.of_config(config.plain, [group]).get(group, {})
    found = fields.get(leaf) or _of_recipe(config).get(key)
    return found.check if found else None


def _of_recipe(config: Config) -> dict[str, Field]:
    path = config.recipe.target or RECIPES[config.recipe.name]
    fields: Mapping[str, Field] = {}
    with contextlib.suppress(Exception):  # without its class, the first trial will fail and say why
        fields = recipe_facts(path).keys
    return {f"recipe.{key}": field for key, field in fields.items()}


def read_space(words: Sequence[str]) -> Space:
    """Search spaces by key, of words as Hydra writes sweeps:
    ``optimizer.lr=tag(log,interval(1e-4,1e-2))`` or ``recipe.switch=auto,0.2,0.5``."""
    overrides, problems = command_line.parsed(words)
    spaces = {override.key_or_group: _search(override) for override in overrides}
    problems += [f"--over {o.input_line}: {TAKES}" for o in overrides if _search(o) is None]
    keys = [override.key_or_group for override in overrides]
    problems += [f"--over {key} is there twice" for key in spaces if keys.count(key) > 1]
    raise_all(problems)
    return {key: search for key, search in spaces.items() if search is not None}


def _search(override: Override) -> Search | None:
    value = override.value()
    if "." not in override.key_or_group:  # where and how often it runs, or a whole group
        return None
    if isinstance(value, ChoiceSweep):
        return among(*command_line.values(override, []))
    if isinstance(value, IntervalSweep):
        low, high = float(value.start or 0), float(value.end or 0)
        if low < high and ("log" not in value.tags or low > 0):
            return (log if "log" in value.tags else between)(low, high)
    return None


def space_text(space: Space) -> str:
    return "; ".join(f"{key} {search}" for key, search in space.items())


def at_edge(value: Any, search: Search) -> str:
    """At which end of a range a value lies, within a twentieth of it (of the logarithms, where it
    is searched by them): ``lower``, ``upper``, or nothing. A list has no ends."""
    if search.values:
        return ""
    low, high, point = (math.log(x) if search.log else x for x in (search.low, search.high, value))
    place = (point - low) / (high - low)
    return "lower" if place < EDGE else "upper" if place > 1 - EDGE else ""
