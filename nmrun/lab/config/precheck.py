"""What a command line asks for: its jobs, each composed and checked before the first one runs. A
mistake gets one line, no traceback.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun.errors import ConfigError, extra, raise_all
from nmrun.lab.config import command_line, composition, schema, suggestions
from nmrun.lab.config.command_line import LAUNCHER
from nmrun.lab.config.composition import Cache, composing, of_groups, plain_errors
from nmrun.lab.config.experiment import Experiment
from nmrun.lab.config.identity import run_folder
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config, flatten
from nmrun.lab.keys.options import NAMED, RATIO
from nmrun.lab.signals import of_interrupt
from nmrun.patterns import Pattern, PatternError
from nmrun.ranges import Check, whole
from nmrun.registry import no_such

MOST_JOBS = 10_000  # of one command, since all are composed before the first one runs
# of Hydra's own keys those that it takes with any value, and then fails
HYDRAS = {
    "hydra.launcher.n_jobs": Check("1 or more, or -1 for all cores", lambda value: value != 0),
    "hydra.sweeper.max_batch_size": Check(
        "1 or more, or null for all jobs at once", whole(1, optional=True).holds
    ),
    "hydra.sweeper.params": Check(
        "values by key, such as {seed: '0,1'}", lambda value: isinstance(value, dict | None)
    ),
    "hydra.job.chdir": Check("false; runs go to output_dir=...", lambda value: value is not True),
}
# those that would do nothing here
REFUSED = {
    **dict.fromkeys(
        ("hydra/sweeper", "hydra.sweeper._target_"),
        "nmrun -m has a sweeper of its own; nmrun tune searches settings",
    ),
    **dict.fromkeys(
        ("hydra.run.dir", "hydra.sweep.dir"), "runs go to output_dir=...; leave it out"
    ),
    "hydra.searchpath": "--config-dir adds a folder of configs",
    "hydra.mode": "nmrun -m is what makes a sweep; leave it out",
}
OF_SWEEPS = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
# of Hydra's settings those with keys of their own, and those that follow from the command
PARTS = ("job", "run", "sweep", "launcher", "sweeper")
OF_COMMAND = {"runtime", "overrides", "job.override_dirname"}


@dataclass(frozen=True)
class Launcher:
    """What differs between launchers.

    ``extra`` is the extra of nmrun that has it, empty for Hydra's own; ``plugin`` is Hydra's name of
    it, and ``target`` its class. ``needs`` is a program that it calls. ``here``: its jobs run on this
    machine. ``queues``: its jobs outlive the command.

    ``signals`` is how jobs get a signal that the sweep's process gets: ``passed`` on to processes
    that this has started, or ``read`` by them in the sweep's record. None: they do not.
    """

    extra: str
    plugin: str
    target: str
    needs: str | None = None
    here: bool = False
    signals: Literal["passed", "read"] | None = None
    queues: bool = False


OTHER = Launcher("", "", "")  # of which nothing is known
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."
SLURM = Launcher(
    "launchers", "submitit_slurm", f"{SUBMITIT}SlurmLauncher", needs="sbatch", queues=True
)
RAY = "hydra_plugins.hydra_ray_launcher."
LAUNCHERS = {
    "basic": Launcher("", "basic", BASIC, here=True),
    "joblib": Launcher("launchers", "joblib", JOBLIB, here=True, signals="passed"),
    "submitit_local": Launcher(
        "launchers", "submitit_local", f"{SUBMITIT}LocalLauncher", here=True, signals="read"
    ),
    "slurm": SLURM,
    "submitit_slurm": SLURM,
    "ray": Launcher("ray", "ray", f"{RAY}ray_launcher.RayLauncher", signals="read"),
    "ray_aws": Launcher("ray", "ray_aws", f"{RAY}ray_aws_launcher.RayAWSLauncher", signals="read"),
}


def launcher_of(target: str) -> Launcher:
    """What is known of the launcher of this class, under whatever name."""
    return next((each for each in LAUNCHERS.values() if each.target == target), OTHER)


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
    known: Launcher

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
    launcher, hydras, known = "basic", any(said) or _speak_of_hydra(config_dir), LAUNCHERS["basic"]
    with composing(config_dir):
        for words in sweeps:
            try:
                with plain_errors():
                    sweep = _Sweep(words, multirun, hydras, problems)
                    launcher, known = sweep.launcher, sweep.known
                    sweep.compose(jobs, cache)
                    if len(jobs) > MOST_JOBS:
                        line = (
                            f"sweeps of {len(jobs):,} jobs or more: one command takes {MOST_JOBS:,}"
                        )
                        problems.append(line)
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


def _speak_of_hydra(config_dir: str | None) -> bool:
    """Whether the files of a folder of configs speak of Hydra, by any word: of its launcher, or of more
    values to sweep."""
    if config_dir is None:
        return False
    files = [file for file in Path(config_dir).rglob("*.yaml") if os.access(file, os.R_OK)]
    return (Path(config_dir) / "hydra").is_dir() or any(
        "hydra" in file.read_text(errors="replace") for file in files if file.is_file()
    )


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
        self.problems += unreadable
        loader = GlobalHydra.instance().config_loader()
        named = [command_line.values(o, []) for o in overrides if o.key_or_group == LAUNCHER]
        self.launcher = ",".join(map(str, named[-1])) if named else "basic"
        self.known = LAUNCHERS.get(self.launcher, OTHER)
        said = [(str(o.input_line), o.key_or_group, o.value()) for o in overrides]
        missing = _refused(said, heard=True) + _not_here(self.launcher, loader)
        settings = _settings(overrides) if hydras and not missing and not unreadable else None
        if settings is not None:
            if multirun:  # files may choose the launcher too
                self.launcher = str(settings.runtime.choices[LAUNCHER])
                self.known = launcher_of(OmegaConf.select(settings, "launcher._target_"))
                missing += _not_here(self.launcher, loader)
            heard = self.launcher != "basic"
            missing += _refused(said, heard) or _refused(_in_files(settings), heard)
            params = OmegaConf.select(settings, "sweeper.params")
            if multirun and isinstance(params, Mapping):  # files may add to what is swept
                swept = [command_line.parse(f"{key}={values}") for key, values in params.items()]
                overrides = [*swept, *overrides]
        if self.launcher != "basic" and not multirun and not missing:
            missing.append(f"launcher={self.launcher}: launchers are for sweeps; add -m")
        for override in overrides:
            group, _, leaf = override.key_or_group.rpartition(".")
            if group == "hydra.launcher" and (self.launcher == "basic" or leaf == "jobs"):
                how = suggestions.INSTEAD["--jobs"]
                missing.append(f"{override.input_line}: no such key; {how}")
        self.problems += missing
        for_hydra = [o for o in overrides if command_line.is_hydras(o.key_or_group)]
        self.for_hydra = [override.input_line or "" for override in for_hydra]
        if missing:  # then what is said to it is left out
            out = (*OF_SWEEPS, *REFUSED)
            self.for_hydra = [w for w in self.for_hydra if not w.lstrip("+~").startswith(out)]
        # the last word for a key counts
        written = {o.key_or_group: o for o in overrides if o not in for_hydra}
        groups = loader.get_group_options("", ObjectType.GROUP)
        self.groups = {group for group in groups if group != "hydra"}
        self.count = 1  # of jobs
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
            if fits and (bad or isinstance(override.value(), Glob)):
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
        if self.count > MOST_JOBS:
            line = f"a sweep of {self.count:,} jobs: one command takes {MOST_JOBS:,}"
            self.problems.append(line)
            return
        products = composition.product(self.overrides)
        every = [list(map(command_line.unescaped, words)) for words in products]
        wrong: list[str] = []
        # by key that is not in the configs of some jobs: their words, and the keys that there are
        unknown: dict[str, tuple[list[str], set[str]]] = {}
        having = Counter[str]()
        for words in every:
            config, values = of_groups([*self.for_hydra, *words], cache)
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


def _refused(said: Iterable[tuple[str, str, Any]], heard: bool) -> list[str]:
    """A line for each word to Hydra, or setting of a file, that would do nothing here or fail later;
    each as it is called, with its key and value. ``heard``: whether one of Hydra's launchers runs the
    jobs, so that most do something."""
    problems = []
    for called, key, value in said:
        if key in REFUSED:
            problems.append(f"{called}: {REFUSED[key]}")
        elif key in HYDRAS and not HYDRAS[key].holds(value):
            problems.append(f"{called}: it takes {HYDRAS[key].allowed}")
        elif command_line.is_hydras(key) and not heard and not key.startswith(OF_SWEEPS):
            how = "Hydra hears it where a launcher of its own runs a sweep's jobs"
            problems.append(f"{called}: {how}")
    return problems


def _settings(overrides: Sequence[Override]) -> DictConfig | None:
    """Hydra's own settings, by words and by files of the user's. None where they cannot be composed,
    which the jobs then tell."""
    fixed = [o.input_line or "" for o in overrides if not o.is_sweep_override()]
    try:
        return compose("nmrun", fixed, return_hydra_config=True).hydra
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError, AttributeError):
        return None


def _in_files(settings: DictConfig) -> Iterator[tuple[str, str, Any]]:
    """What differs from Hydra's settings of every command. It stands in files, where no word says
    it."""
    usual, here = _usual(), _by_key(settings)
    for key in {**usual, **here}:
        if usual.get(key) != (value := here.get(key)):
            yield f"{key} in a file of yours", key, value


@functools.cache
def _usual() -> dict[str, Any]:
    with composing():
        return _by_key(compose("nmrun", [], return_hydra_config=True).hydra)


def _by_key(settings: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(settings, resolve=False)
    parts = {part: plain.pop(part, None) or {} for part in PARTS}
    flat = plain | {f"{part}.{key}": parts[part][key] for part in parts for key in parts[part]}
    return {f"hydra.{key}": value for key, value in flat.items() if key not in OF_COMMAND}


def _not_here(launcher: str, loader: ConfigLoader) -> list[str]:
    """A line for a launcher that does not exist, is not installed, or has no cluster here."""
    installed = loader.get_group_options(LAUNCHER)
    known = LAUNCHERS.get(launcher, OTHER)
    if known is OTHER and launcher not in installed:
        names = sorted({*installed, *LAUNCHERS})
        return [f"launcher={launcher}: {no_such('launcher', launcher, names)}"]
    if known is not OTHER and known.plugin not in installed:
        return [f"launcher={launcher} is not installed: {extra(known.extra)}"]
    if known.needs and shutil.which(known.needs) is None:
        return [f"launcher={launcher}: there is no {known.needs} here; joblib needs no cluster"]
    return []
