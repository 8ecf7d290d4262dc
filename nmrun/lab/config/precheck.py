"""What a command line asks for: its jobs, each composed and checked before the first one runs. A
mistake gets one line, no traceback.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from nmrun.errors import ConfigError, raise_all
from nmrun.lab.config import command_line, composition, launchers, schema, suggestions
from nmrun.lab.config.composition import Cache, composing, of_groups, plain_errors
from nmrun.lab.config.experiment import Experiment
from nmrun.lab.config.identity import run_folder
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config, flatten
from nmrun.lab.keys.options import NAMED, RATIO
from nmrun.lab.signals import of_interrupt
from nmrun.patterns import Pattern, PatternError


class Job(NamedTuple):
    """The overrides of a run, and its checked config."""

    words: list[str]
    config: Config


@dataclass(frozen=True)
class Command:
    """What a command line asks for: the overrides of each sweep, its jobs, each once, and the
    launcher that runs them, with what is ``known`` of it; ``basic`` is this process itself.
    """

    sweeps: list[list[str]]
    jobs: list[Job]
    launcher: str
    known: launchers.Launcher

    @property
    def output_dir(self) -> str:
        return self.jobs[0].config.output_dir

    @property
    def detach(self) -> bool:
        return self.jobs[0].config.detach

    @property
    def dry(self) -> bool:
        return self.jobs[0].config.dry


def read(
    sweeps: Sequence[list[str]],
    multirun: bool = False,
    config_dir: str | None = None,
    cache: Cache | None = None,
    to_run: bool = True,
) -> Command:
    """Compose and check the jobs of some sweeps. ``cache`` is as of
    :func:`nmrun.lab.config.composition.composed`; ``to_run`` says whether the files, packages and
    devices that the runs need have to be here.

    Raises ConfigError with all that is wrong, one line each.
    """
    cache = {} if cache is None else cache
    problems: list[str] = []
    if multirun and not all(sweeps):
        problems.append("-m: it takes several values of a key, as in nmrun -m seed=0,1,2")
    said = {tuple(filter(command_line.is_hydras, words)) for words in sweeps}
    if len(said) > 1:
        line = "the sweeps of an experiment differ in words for Hydra: they have one launcher"
        problems.append(line)
    jobs: dict[str, Job] = {}
    hydras = any(said) or launchers.speaks_of_hydra(config_dir)
    launcher, known = "basic", launchers.LAUNCHERS["basic"]
    with composing(config_dir):
        for words in sweeps:
            try:
                with plain_errors():
                    sweep = _Sweep(words, multirun, hydras, problems)
                    launcher, known = sweep.hydra.launcher, sweep.hydra.known
                    sweep.compose(jobs, cache)
                    if len(jobs) > command_line.MOST_JOBS:
                        most = f"one command takes {command_line.MOST_JOBS:,}"
                        problems.append(f"sweeps of {len(jobs):,} jobs or more: {most}")
                        break
            except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
                named = isinstance(error, yaml.YAMLError) or getattr(error, "filename", None)
                what = "" if named else f"a file in --config-dir {config_dir}"
                problems.append(options.unreadable(error, what))
            except ConfigError as error:
                problems += error.problems
    if to_run and not problems:
        for job in jobs.values():
            problems += schema.refusals(job.config.plain, known.here)
    raise_all(dict.fromkeys(problems))
    return Command(list(sweeps), list(jobs.values()), launcher, known)


def configs(
    experiment: Experiment, scale: str, changes: Sequence[str] = (), cache: Cache | None = None
) -> list[Config]:
    """The checked configs of an experiment's runs, each once. ``changes`` are overrides that win
    over its own."""
    sweeps = [
        [word for word in command_line.own_recipe(words) if not command_line.is_hydras(word)]
        for words in command_line.of_experiment(experiment, scale, changes)
    ]
    jobs = read(sweeps, multirun=True, cache=cache, to_run=False).jobs
    return list({run_folder(config): config for _, config in jobs}.values())


class _Sweep:
    """The words of one sweep, or of one run, while Hydra is initialized; mistakes are added to
    ``problems``."""

    def __init__(self, words: list[str], multirun: bool, hydras: bool, problems: list[str]) -> None:
        self.multirun, self.problems = multirun, problems
        # groups with a wrong option: their keys are not checked, since its default stands in
        self.unsure: set[str] = set()
        overrides, unreadable = command_line.parsed(words)
        self.hydra = launchers.hydra_words(overrides, multirun, speaks=hydras and not unreadable)
        self.problems += unreadable + self.hydra.problems
        # the last word for a key counts
        written = {override.key_or_group: override for override in self.hydra.of_jobs}
        loader = GlobalHydra.instance().config_loader()
        groups = loader.get_group_options("", ObjectType.GROUP)
        self.groups = {group for group in groups if group != "hydra"}
        self.count: float = 1  # of jobs
        self.overrides: list[Override] = []
        for key, override in written.items():
            in_group = key in self.groups
            options = loader.get_group_options(key) if in_group else None
            self._read(key, override, options)
        if not multirun and (line := _not_sparse(self.overrides)):
            self.problems.append(line)

    def _read(self, key: str, override: Override, options: list[str] | None) -> None:
        """Keep an override with those of its values that may be right."""
        if override.is_delete():
            self.overrides.append(override)
            return
        value = override.value()
        if isinstance(value, dict):  # keys of the group, and no option
            options = None
        most = command_line.MOST_JOBS
        if isinstance(value, RangeSweep) and (count := command_line.length(value)) > most:
            self.count *= count  # too many to make, which compose says
            return
        words = [_word(value) for value in command_line.values(override, options or [])]
        wrong = list(self._mistakes(key, override, words, options))
        self.problems += wrong
        fits = not wrong
        if options is not None:
            bad = {word: why for word in words if (why := _wrong_option(key, word, options))}
            self.problems += bad.values()
            words = [word for word in words if word not in bad]
            if bad or not fits:
                self.unsure.add(key)
            fits = fits and bool(words)
            if fits and (bad or isinstance(value, Glob)):
                override = command_line.parse(f"{override.get_key_element()}={','.join(words)}")
        if fits:
            self.overrides.append(override)
            self.count *= len(words)

    def _mistakes(
        self, key: str, override: Override, words: list[str], options: list[str] | None
    ) -> Iterator[str]:
        """What is wrong with an override whatever its values."""
        line = override.input_line
        if override.package is not None:
            yield f"{line}: write it without @{override.package}"
        if isinstance(override.value(), IntervalSweep):
            yield f"{line}: a sweep takes single values; nmrun tune --over searches an interval"
        if override.is_add() and key in NAMED:
            yield f"{line}: {key} is there already; write it without +"
        if not words:
            there_are = f"matches nothing (there are {', '.join(options)})" if options else ""
            yield f"{line}: {there_are or 'there is no value in it'}"
        elif override.is_sweep_override() and not self.multirun:
            both = f", or {key}={words[0]} track.also=[{','.join(words[1:])}] for one run with both"
            told = both if key == "track" and "local" not in words else ""
            yield f"{line}: several values make a sweep; add -m{told}"
        for word, count in Counter(words).items():
            if count > 1:
                yield f"{line}: {word} is there twice"

    def compose(self, jobs: dict[str, Job], cache: Cache) -> None:
        """Compose and check each job, and add those that are not there yet, by what they come to:
        sweeps may share runs, and a dense run is the same whatever its ratio."""
        if self.count > command_line.MOST_JOBS:
            self.problems.append(command_line.too_many(self.count))
            return
        products = composition.product(self.overrides)
        every = [list(map(command_line.unescaped, words)) for words in products]
        wrong: list[str] = []
        # by key that is not in the configs of some jobs: their words, and the keys that there are
        unknown: dict[str, tuple[list[str], set[str]]] = {}
        having = Counter[str]()
        for words in every:
            config, values = of_groups([*self.hydra.words, *words], cache)
            for override in values:
                key = override.key_or_group
                if override.is_add() and OmegaConf.select(config, key, default=_word) is not _word:
                    wrong.append(
                        f"{override.input_line}: {key} is there already; write it without +"
                    )
                elif not _put(config, override) and key.partition(".")[0] not in self.unsure:
                    plain: Any = OmegaConf.to_container(config, resolve=False)
                    of_jobs, keys = unknown.setdefault(key, ([], set()))
                    of_jobs += words
                    keys |= {*plain, *flatten(plain)}
                    having[key] += 1
            try:
                checked = schema.check(config, self.unsure)
                job = Job(command_line.alone(words), checked)
                jobs.setdefault(json.dumps(checked.plain), job)
            except ConfigError as error:
                wrong += error.problems
        for key, (of_jobs, keys) in unknown.items():
            chosen = {w: 0 for w in of_jobs if command_line.key(w) == key.partition(".")[0]}
            if chosen and having[key] < len(every):
                self.problems += [f"{key}: no such key with {word}" for word in chosen]
            else:
                self.problems.append(suggestions.line(key, keys | self.groups))
        self.problems += wrong


def _put(config: DictConfig, override: Override) -> bool:
    """Set, add or delete a key; returns False if it does not exist and must not be added."""
    above, _, leaf = override.key_or_group.rpartition(".")
    changes = not (override.is_add() or override.is_force_add() or override.is_delete())
    group = OmegaConf.select(config, above) if above else config
    if changes and not isinstance(group, DictConfig):
        return False
    try:
        composition.put(config, override)
    except ConfigCompositionException as error:
        if not changes or leaf in [*group] or of_interrupt(error):
            raise
        return False
    return True


def _not_sparse(overrides: Sequence[Override]) -> str | None:
    """Of a sweep, which has one dense column, that is no mistake."""
    chosen = {o.key_or_group: o.value() for o in overrides if not o.is_sweep_override()}
    recipe = chosen.get("recipe", "dense")
    if recipe == "dense" or chosen.get(RATIO) != "dense":
        return None
    return (
        f"recipe={recipe} with sparsity=dense: no weight would be sparse; "
        "for the dense reference write recipe=dense"
    )


def _word(option: Any) -> str:
    return "null" if option is None else str(option)


def _wrong_option(group: str, option: str, options: list[str]) -> str | None:
    if group == RATIO and option != "dense":
        try:
            Pattern.parse(option)
        except PatternError as error:
            return f"sparsity={option}: {error}; or dense"
        return None if ":" in option else f"sparsity={option}: write it with a colon"
    sources = GlobalHydra.instance().config_loader().get_sources()
    below = os.sep in option and option[0] not in "./~"  # a folder of the group
    if option in options or (below and any(s.is_config(f"{group}/{option}") for s in sources)):
        return None
    return suggestions.option(group, option, options)
