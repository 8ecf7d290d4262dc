"""Checks every job of a command line before Hydra runs one: a mistake gets one line, no traceback."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from nmrun.errors import ConfigError, extra
from nmrun.lab.keys import options
from nmrun.lab.keys.config import flatten
from nmrun.lab.keys.options import NAMED
from nmrun.lab.words import command_line, rules, schema, suggestions
from nmrun.lab.words.composition import RATIO, Cache, composed, composing, plain_errors
from nmrun.patterns import Pattern, PatternError
from nmrun.registry import no_such

# jobs that are checked ahead; a mistake shows in the first few, and each job is checked as it begins
MOST_JOBS = 5000
LAUNCHER = "hydra/launcher"
# the extra of nmrun that a launcher comes with
EXTRAS = {
    **dict.fromkeys(("joblib", "submitit_local", "submitit_slurm"), "launchers"),
    **dict.fromkeys(("ray", "ray_aws"), "ray"),
}
# of Hydra's own keys those that it takes with any value, and then fails
HYDRAS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("hydra.launcher.n_jobs", "1 or more, or -1 for all cores", lambda value: value != 0),
    (
        "hydra.sweeper.max_batch_size",
        "1 or more, or null for all jobs at once",
        lambda value: value is None or (type(value) is int and value > 0),
    ),
    (
        "hydra.sweeper.params",
        "values by key, such as {seed: '0,1'}",
        lambda value: isinstance(value, dict | None),
    ),
)
HERE = ("basic", "joblib", "submitit_local")  # launchers whose jobs run on this machine


@dataclass
class Findings:
    """What :func:`look` found.

    ``launcher`` runs the jobs; ``basic`` is this process itself. ``composed`` are the configs that
    were composed, by their choices of groups; jobs begin with these.
    """

    problems: list[str] = field(default_factory=list)
    jobs: int = 1
    output_dir: str = ""
    dry: bool = False
    launcher: str = "basic"
    seeds: set[int] = field(default_factory=set)
    composed: Cache = field(default_factory=dict)


def look(
    words: list[str],
    multirun: bool = False,
    config_dir: str | None = None,
    cache: Cache | None = None,
) -> Findings:
    """Check every job of a sweep, in well under a second: a config is composed once for each option
    of a group. The sweeps of one command line share ``cache``, which is added to.

    Raises ConfigError for a sweep over nothing.
    """
    findings = Findings(composed={} if cache is None else cache)
    if multirun and not words:
        raise ConfigError("-m: it takes several values of a key, as in nmrun -m seed=0,1,2")
    if config_dir is not None and not Path(config_dir).is_dir():
        findings.problems.append(f"--config-dir {config_dir}: no such folder")
        config_dir = None
    try:
        with plain_errors(), composing(config_dir):
            _Look(words, multirun, findings).check_jobs(multirun)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        named = isinstance(error, yaml.YAMLError) or getattr(error, "filename", None)
        what = "" if named else f"a file in --config-dir {config_dir}"
        findings.problems.append(options.unreadable(error, what))
    except ConfigError as error:
        findings.problems += error.problems
    findings.problems = list(dict.fromkeys(findings.problems))
    return findings


class _Look:
    """One look at a command line, while Hydra is initialized; mistakes are added to ``findings``."""

    def __init__(self, words: list[str], multirun: bool, findings: Findings) -> None:
        self.findings = findings
        self.options: dict[str, list[Any]] = {}  # by group: its options that exist
        self.values: dict[str, list[Any]] = {}  # by key: its values
        # groups with a wrong option: their keys are not checked, since its default stands in
        self.unsure: set[str] = set()
        overrides, unreadable = command_line.parsed(words)
        findings.problems += unreadable
        self.for_hydra: list[str] = [
            o.input_line or ""
            for o in overrides
            if o.is_delete() or o.key_or_group.startswith("hydra")
        ]
        self.written = {o.key_or_group: o for o in overrides if o.input_line not in self.for_hydra}
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        launcher, missing = _launcher(overrides, loader)
        if launcher != "basic" and not multirun and not missing:
            missing.append(f"{LAUNCHER}={launcher}: launchers are for sweeps; add -m")
        findings.problems += missing
        if missing:  # and its options are not checked
            left_out = (LAUNCHER, "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
            self.for_hydra = [w for w in self.for_hydra if not w.startswith(left_out)]
        findings.launcher, self.on_this_machine = launcher, launcher in HERE
        search_path = [word for word in self.for_hydra if word.startswith("hydra.searchpath")]
        # the loader would copy all its sources for each group that it is asked for
        _, repository = loader._parse_overrides_and_create_caching_repo(None, search_path)
        self.groups = {
            name: repository.get_group_options(name)
            for name in repository.get_group_options("", ObjectType.GROUP)
            if name != "hydra"
        }
        for key, override in self.written.items():
            self._read(key, override, multirun)

    def _read(self, key: str, override: Override, multirun: bool) -> None:
        """Note the values of an override: options of a group, or values of a key."""
        problems, options = self.findings.problems, self.groups.get(key)
        if override.package is not None:
            problems.append(f"{override.input_line}: write it without @{override.package}")
        several = command_line.values(override, options or [])
        if isinstance(override.value(), IntervalSweep):
            problems.append(
                f"{override.input_line}: a sweep takes single values; nmrun tune --over searches an interval"
            )
        if override.is_add() and key in NAMED:
            problems.append(f"{override.input_line}: {key} is there already; write it without +")
        if override.is_sweep_override() and not multirun:
            first, *more = map(_word, several)
            both = f", or {key}={first} track.also=[{','.join(more)}] for one run with both"
            problems.append(
                f"{override.input_line}: several values make a sweep; add -m"
                + (both if key == "track" and "local" not in several else "")
            )
        if not several:
            there_are = f"matches nothing (there are {', '.join(options)})" if options else ""
            problems.append(f"{override.input_line}: {there_are or 'there is no value in it'}")
        counts = Counter(map(_word, several))
        problems += [
            f"{override.input_line}: {text} is there twice" for text, n in counts.items() if n > 1
        ]
        self.findings.jobs *= len(several)
        if options is None:
            self.values[key] = several
            return
        wrong = {
            _word(option): line
            for option in several
            if (line := _wrong_option(key, _word(option), options))
        }
        if wrong:
            problems += wrong.values()
            self.unsure.add(key)
        if len(wrong) < len(several):
            self.options[key] = [option for option in several if _word(option) not in wrong]

    def check_jobs(self, multirun: bool) -> None:
        """Join the options of groups and the values of keys to jobs, and check each."""
        first = {group: options[0] for group, options in self.options.items()}
        swept = {group: options for group, options in self.options.items() if len(options) > 1}
        base = self._compose(first)
        variants = {
            (group, _word(option)): base
            if option == first[group]
            else self._compose({**first, group: option})
            for group, options in swept.items()
            for option in options
        }
        self._drop_unknown(base, variants.values())
        plain = self._resolve(base)
        # an option changes its group in the config; an overlay such as debug any keys
        parts = {}
        for (group, option), variant in variants.items():
            full = self._resolve(variant)
            keys = (
                [group] if group in plain else [key for key in full if full[key] != plain.get(key)]
            )
            parts[group, option] = {key: full[key] for key in keys}
        self.findings.output_dir = str(plain.get("output_dir"))
        self.findings.dry = plain.get("dry") is True
        if not multirun and (line := _not_sparse(first)):
            self.findings.problems.append(line)

        # sorted, so that a group of the command line overrides an overlay
        in_order = sorted(swept, key=lambda group: group in plain)
        values = {key: several for key, several in self.values.items() if several}
        product = itertools.product(*swept.values(), *values.values())
        for job in itertools.islice(product, MOST_JOBS):
            choice = dict(zip((*swept, *values), job, strict=True))
            config = {**plain}
            for group in in_order:
                config |= parts[group, _word(choice[group])]
            config = {
                key: dict(value) if isinstance(value, dict) else value
                for key, value in config.items()
            }
            for key in values:
                group, value = key.partition(".")[0], choice[key]
                if isinstance(value, str) and "${" in value:
                    value = _interpolated(base, key, value)
                if (
                    not _put(config, key, value, _adds(self.written[key]))
                    and group not in self.unsure
                ):
                    self.findings.problems.append(
                        f"{key}: no such key with {group}={choice.get(group)}"
                    )
            wrong = schema.problems(config, self.unsure)
            self.findings.problems += wrong
            if not wrong:
                self.findings.seeds.add(config["seed"])
            if not wrong and not self.findings.problems:
                self.findings.problems += rules.refusals(config, self.on_this_machine)

    def _compose(self, choices: dict[str, Any]) -> DictConfig:
        """Compose the config with these options of groups, without the values of keys."""
        words = (
            f"{'+' if self.written[g].is_add() and g not in NAMED else ''}{g}={_word(option)}"
            for g, option in choices.items()
        )
        return composed([*self.for_hydra, *words], self.findings.composed)

    def _resolve(self, config: DictConfig) -> dict[str, Any]:
        """Resolve a config, with the first value of each key, which interpolations may refer to."""
        config = config.copy()
        for key, several in self.values.items():
            if several and (
                _adds(self.written[key])
                or OmegaConf.select(config, key, default=_word) is not _word
            ):
                OmegaConf.update(config, key, several[0], force_add=True)
        return schema.resolve(config)

    def _drop_unknown(self, base: DictConfig, variants: Iterable[DictConfig]) -> None:
        keys = {
            key for config in map(_raw, (base, *variants)) for key in (*config, *flatten(config))
        }
        for key, override in self.written.items():
            if override.is_add() and key in self.values and key in keys:
                self.findings.problems.append(
                    f"{override.input_line}: {key} is there already; write it without +"
                )
            if (
                key in self.values
                and key not in keys
                and not _adds(override)
                and key.partition(".")[0] not in self.unsure
            ):
                self.findings.problems.append(suggestions.line(key, keys | set(self.groups)))
                del self.values[key]


def _interpolated(config: DictConfig, key: str, value: str) -> Any:
    """What a value of the command line such as ``${oc.env:SEED}`` is in this config."""
    config = config.copy()
    OmegaConf.update(config, key, value, force_add=True)
    resolved = OmegaConf.create(schema.resolve(config))
    return OmegaConf.select(resolved, key)


def _not_sparse(choices: dict[str, Any]) -> str | None:
    """Of a sweep, which has one dense column, that is no mistake."""
    recipe = _word(choices.get("recipe", "dense"))
    if recipe == "dense" or choices.get(RATIO) != "dense":
        return None
    return (
        f"recipe={recipe} with sparsity=dense: no weight would be sparse; "
        "for the dense reference write recipe=dense"
    )


def _adds(override: Override) -> bool:
    return override.is_add() or override.is_force_add()


def _word(option: Any) -> str:
    return "null" if option is None else str(option)


def _raw(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return dict(plain)


def _put(config: dict[str, Any], key: str, value: Any, add: bool) -> bool:
    """Set a dotted key; returns False if it does not exist and must not be added."""
    *path, leaf = key.split(".")
    for name in path:
        config = config.setdefault(name, {}) if add else config.get(name, {})
        if not isinstance(config, dict):
            return False
    if leaf not in config and not add:
        return False
    config[leaf] = value
    return True


def _wrong_option(group: str, option: str, options: list[str]) -> str | None:
    if group == RATIO and option != "dense":
        try:
            Pattern.parse(option)
        except PatternError as error:
            return f"sparsity={option}: {error}; or dense"
        return None if ":" in option else f"sparsity={option}: write it with a colon"
    if option in options or (os.sep in option and option[0] not in "./~"):
        return None
    return suggestions.option(group, option, options)


def by_hydra(sweeps: Sequence[Sequence[str]], config_dir: str | None) -> bool:
    """Whether Hydra launches the jobs: overrides or a folder of configs say something to it."""
    if any(map(command_line.is_hydras, itertools.chain(*sweeps))):
        return True
    if config_dir is None:
        return False
    return (Path(config_dir) / "hydra").is_dir() or any(
        _speaks_to_hydra(file)
        for file in Path(config_dir).rglob("*.yaml")
        if file.is_file() and os.access(file, os.R_OK)
    )


def _speaks_to_hydra(file: Path) -> bool:
    """Whether a config has keys of Hydra's, or chooses an option of its groups."""
    text = file.read_text(errors="replace")
    if re.search(r"^#\s*@package\s+hydra\b", text, re.MULTILINE):
        return True
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:  # which is told of where the file is composed
        return False
    if not isinstance(content, dict):
        return False
    listed = content.get("defaults")
    entries = listed if isinstance(listed, list) else []
    names = [str(n) for entry in entries for n in (entry if isinstance(entry, dict) else [entry])]
    chosen = [name.removeprefix("override ").lstrip("/") for name in names]
    return "hydra" in content or any(name.startswith("hydra/") for name in chosen)


def _launcher(overrides: Sequence[Override], loader: ConfigLoaderImpl) -> tuple[str, list[str]]:
    """The launcher that is asked for, ``basic`` by default, and a line for what there is not."""
    name, problems = "basic", []
    for override in overrides:
        if override.key_or_group == "hydra/sweeper":
            problems.append(
                f"{override.input_line}: nmrun -m has a sweeper of its own; nmrun tune searches settings"
            )
        chdir = override.key_or_group == "hydra.job.chdir" and override.value() is True
        if chdir or override.key_or_group in ("hydra.run.dir", "hydra.sweep.dir"):
            problems.append(f"{override.input_line}: runs go to output_dir=...; leave it out")
        if override.key_or_group == "hydra.mode":
            problems.append(f"{override.input_line}: nmrun -m is what makes a sweep; leave it out")
        for key, takes, fits in HYDRAS:
            if override.key_or_group == key and not fits(override.value()):
                problems.append(f"{override.input_line}: it takes {takes}")
        if override.key_or_group != LAUNCHER:
            continue
        name, installed = str(override.value()), loader.get_group_options(LAUNCHER)
        if name not in installed and name in EXTRAS:
            problems.append(f"{LAUNCHER}={name} is not installed: {extra(EXTRAS[name])}")
        elif name == "submitit_slurm" and shutil.which("srun") is None:
            problems.append(
                f"{LAUNCHER}={name}: there is no srun here; submitit_local does without"
            )
        elif name not in installed:
            names = sorted({*installed, *EXTRAS})
            problems.append(f"{LAUNCHER}={name}: {no_such(LAUNCHER, name, names)}")
    for override in overrides:
        group, _, leaf = override.key_or_group.rpartition(".")
        if group == "hydra.launcher" and (name == "basic" or leaf == "jobs"):
            problems.append(f"{override.input_line}: no such key; {suggestions.INSTEAD['--jobs']}")
    return name, problems
