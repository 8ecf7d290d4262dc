"""The plan of a comparison of tuned recipes: its cells, what each searches, and the number of runs.

A cell is what a table shows: one recipe at one ratio, and one value of every other key that is
swept. Searched are the learning rate, and what the recipe's class declares beside a hyperparameter's
range: ``decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 2e-4``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep

from nmrun.errors import ConfigError, raise_all, refused
from nmrun.lab.compare.notation import label
from nmrun.lab.config import command_line
from nmrun.lab.config.composition import Cache, config_of
from nmrun.lab.config.identity import identity
from nmrun.lab.config.precheck import Job
from nmrun.lab.keys.config import Config, flatten
from nmrun.lab.keys.options import Field, recipe_facts
from nmrun.lab.output import quantity
from nmrun.lab.tune.study import AGAIN, FINALISTS, SEED
from nmrun.ranges import Search, among, between, log
from nmrun.recipes import RECIPES


@dataclass(frozen=True)
class TuningCell:
    """One recipe at one ratio.

    Attributes:
        words: its overrides, without a seed.
        config: before tuning.
        seeds: those that are reported.
        searched: the search spaces by key.
        apart: the values of the swept keys that are not searched, but for recipe and ratio.
    """

    name: str
    words: list[str]
    config: Config
    seeds: list[int]
    folder: Path
    searched: Space
    apart: Mapping[str, str]
    config_dir: str | None

    @property
    def defaults(self) -> dict[str, Any]:
        values = settings(self.config)
        return {key: values[key] for key in self.searched}

    def with_settings(self, params: Iterable[tuple[str, Any]]) -> list[str]:
        """The overrides of a run with these values of searched keys."""
        words = [*self.words, *(command_line.word(key, value) for key, value in params)]
        return command_line.own_recipe(words, self.config_dir)


def cells(
    folder: Path, jobs: Sequence[Job], space: Space, config_dir: str | None = None
) -> list[TuningCell]:
    """The cells of a comparison in the order of its jobs; dense runs, which have no ratio, are
    one. ``space`` wins over the recipes' own search spaces.

    ConfigError for a key of ``space`` that no cell has or that changes none, or with a value or an
    end that a cell does not take, and for several values of a searched key.
    """
    by_identity: dict[str, tuple[list[str], Config, list[int]]] = {}
    cache: Cache = {}
    for words, asked in jobs:
        bare = [word for word in words if command_line.key(word) != "seed"]
        config = config_of([*bare, f"seed={SEED}"], config_dir, cache)
        cell_seeds = by_identity.setdefault(identity(config), (bare, config, []))[2]
        cell_seeds += [asked.seed] if asked.seed not in cell_seeds else []
    unknown = [key for key in space if not any(has(c, key) for _, c, _ in by_identity.values())]
    if unknown:
        raise ConfigError(f"--over {unknown[0]}: no run of this comparison has the key")
    apart = _apart([config for _, config, _ in by_identity.values()])
    names = [
        " ".join(filter(None, [*_named(config), *swept.values()]))
        for (_, config, _), swept in zip(by_identity.values(), apart, strict=True)
    ]
    places = [_place(name) for name in names]
    by_settings: dict[object, TuningCell] = {}
    for (cell_id, (words, config, seeds)), swept, name, place in zip(
        by_identity.items(), apart, names, places, strict=True
    ):
        searched = space_of(config, space)
        other = {key: value for key, value in swept.items() if key not in searched}
        own = place if places.count(place) == 1 else f"{place}-{cell_id}"
        cell = TuningCell(name, words, config, seeds, folder / own, searched, other, config_dir)
        if by_settings.setdefault((*_named(config), *other.items()), cell) is not cell:
            key = next(key for key in swept if key in searched)
            raise ConfigError(
                f"{key} has several values, and is searched in {searched[key]}; give it one"
            )
    every = [_of_runs(cell, space, cache) for cell in by_settings.values()]
    idle = [key for key in space if not any(key in cell.searched for cell in every)]
    if idle:
        raise ConfigError(f"--over {idle[0]}: its values change no run of this comparison")
    return every


def _place(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name)


def _of_runs(cell: TuningCell, space: Space, cache: Cache) -> TuningCell:
    """The cell without those keys of ``space`` whose values change no run of it. ConfigError for a
    value or an end of a range that a key does not take, and for one that stands for another."""
    searched = dict(cell.searched)
    for key in space.keys() & searched.keys():
        runs, others = set(), list[str]()
        for value in space[key].values or (space[key].low, space[key].high):
            with refused("--over ", ConfigError):
                config = config_of(cell.with_settings([(key, value)]), cell.config_dir, cache)
            runs.add(identity(config))
            if (has := flatten(config.plain)[key]) != value:
                others.append(f"--over {key}={label(value)} stands for {label(has)}; name that")
        if len(runs) == 1:
            del searched[key]
        else:
            raise_all(others)
    return replace(cell, searched=searched)


def _named(config: Config) -> tuple[str, str]:
    return config.recipe.name, "" if config.pattern is None else str(config.pattern)


def _apart(configs: Sequence[Config]) -> list[dict[str, str]]:
    """For each config, the values of the swept keys besides recipe and ratio. A recipe's settings
    are among them if only they tell its cells apart."""
    flats = [flatten(config.plain) for config in configs]
    prefixes = ("recipe.", "sparsity.")
    common = _differing([{k: v for k, v in f.items() if not k.startswith(prefixes)} for f in flats])
    apart = [{key: str(flat[key]) for key in common if key in flat} for flat in flats]
    groups: dict[object, list[int]] = {}
    for number, (config, values) in enumerate(zip(configs, apart, strict=True)):
        groups.setdefault((*_named(config), *values.items()), []).append(number)
    for several in groups.values():
        more = _differing([flats[k] for k in several])
        for k in several:
            apart[k] |= {key: str(flats[k].get(key)) for key in more}
    return apart


def _differing(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ; of a group whose option differs, that alone."""
    keys = dict.fromkeys(key for flat in flats for key in flat)
    differing = [key for key in keys if len({repr(flat.get(key)) for flat in flats}) > 1]
    named = {key.partition(".")[0] for key in differing if key.endswith(".name")}
    return [key for key in differing if key.partition(".")[0] not in named or key.endswith(".name")]


def summary(cells: Sequence[TuningCell], trials: int) -> list[str]:
    """The cells, what is searched in each and in which range, and the number of runs."""
    width = max(len(cell.name) for cell in cells)
    lines = []
    for cell in cells:
        searched = "; ".join(f"{key} {search}" for key, search in cell.searched.items())
        lines.append(f"  {cell.name:<{width}}  {searched}")
    seeds, repeats = sum(len(cell.seeds) for cell in cells), min(trials, FINALISTS) * len(AGAIN)
    lines.append(
        f"  {quantity(len(cells), 'cell')}, in each {quantity(trials, 'trial')} and {repeats} repeats of "
        f"the best; {quantity(seeds, 'run')} of seeds: {len(cells) * (trials + repeats) + seeds} runs"
    )
    return lines


RATE = "optimizer.lr"
EDGE = 0.05  # a value this near to an end of a range, as a share of it, lies at that end
AROUND = 5.0  # the learning rate is searched from a fifth of the config's to five times it
Space = Mapping[str, Search]


def space_of(config: Config, space: Space) -> Space:
    """The search spaces of a run by key: of the learning rate, those that the recipe declares, and
    those of ``space`` that the config has, which win."""
    rate = config.optimizer.lr
    declared = {key: field.search for key, field in _of_recipe(config).items() if field.search}
    searched = {RATE: log(rate / AROUND, rate * AROUND), **declared}
    return searched | {key: search for key, search in space.items() if has(config, key)}


def has(config: Config, key: str) -> bool:
    """Whether a key can change a run; dense training has no ratio."""
    of_ratio = key.partition(".")[0] == "sparsity"
    return key in settings(config) and not (of_ratio and config.is_dense)


def settings(config: Config) -> dict[str, Any]:
    """The values of a run by key, with the defaults that a recipe of one's own need not name."""
    defaults = {key: field.default for key, field in _of_recipe(config).items()}
    return defaults | flatten(config.plain)


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
    spaces: dict[str, Search] = {}
    for override in overrides:
        value = override.value()
        if override.key_or_group in spaces:
            problems.append(f"--over {override.key_or_group} is there twice")
        if "." not in override.key_or_group:  # where and how often it runs, or a whole group
            problems.append(
                f"--over {override.input_line}: it takes a key of a group, such as optimizer.lr"
            )
        elif isinstance(value, IntervalSweep):
            ends = float(value.start or 0), float(value.end or 0)
            logarithmic = "log" in value.tags
            if ends[0] >= ends[1] or (logarithmic and ends[0] <= 0):
                problems.append(
                    f"--over {override.input_line}: an interval has the smaller end first"
                    + (", and with log it begins above 0" if logarithmic else "")
                )
            spaces[override.key_or_group] = (log if logarithmic else between)(*ends)
        elif isinstance(value, ChoiceSweep):
            spaces[override.key_or_group] = among(*command_line.values(override, []))
        else:
            problems.append(
                f"--over {override.input_line}: it takes an interval or several values, as in "
                "'optimizer.lr=tag(log,interval(1e-4,1e-2))' or recipe.switch=auto,0.2,0.5"
            )
    raise_all(problems)
    return spaces


def at_edge(value: Any, search: Search) -> str:
    """At which end of a range a value lies, within a twentieth of it (of the logarithms, where it
    is searched by them): ``lower``, ``upper``, or nothing. A list has no ends."""
    if search.values:
        return ""
    low, high, point = (math.log(x) if search.log else x for x in (search.low, search.high, value))
    place = (point - low) / (high - low) if high > low else 0.5
    return "lower" if place < EDGE else "upper" if place > 1 - EDGE else ""


def wider(search: Search, end: str) -> str:
    """A range extended at its ``lower`` or ``upper`` end, as ``--over`` takes it; ``...`` where a
    setting's limit is not known."""
    if not search.log:
        return "..."
    low = search.low / AROUND if end == "lower" else search.low
    high = search.high * AROUND if end == "upper" else search.high
    return f"tag(log,interval({low:g},{high:g}))"
