"""Looks at the command line before Hydra does, so that a mistake costs one helpful line instead of
a traceback.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun.config import schema
from nmrun.config.hydra_quoting import RATIOS, quoting
from nmrun.config.source import GROUP as RATIO
from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError
from nmrun.recipes import installed
from nmrun.registry import did_you_mean
from nmrun.settings import reader

# looked at ahead; what is wrong with a sweep shows long before, and each job is checked again when
# it begins
MOST_JOBS = 5000
Done = dict[tuple[str, ...], DictConfig]


def options(argv: list[str]) -> argparse.Namespace:
    """Hydra's own options, and ``overrides``. Raises ConfigError for one that does not exist."""
    parser = get_args_parser()

    def complain(message: str) -> None:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            raise ConfigError(message)
        bare = unknown[1].lstrip("-")
        hint = did_you_mean(unknown[1].partition("=")[0], parser._option_string_actions)
        raise ConfigError(
            f"{unknown[1]}: no such option{hint or f' (keys are written without dashes: {bare})'}"
        )

    parser.error = complain  # type: ignore[assignment, method-assign]
    parsed = parser.parse_intermixed_args(argv)
    for name in ("config_path", "config_name", "experimental_rerun"):
        if getattr(parsed, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: not for nmrun; --config-dir adds a folder of configs"
            )
    return parsed


def own_recipe(words: list[str]) -> list[str]:
    """The overrides with a recipe class of the user's own made addable: its keys are in no file
    that Hydra could check them against.
    """
    keys = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in words}
    if "recipe._target_" not in keys and not any(
        name in installed() for name in keys.get("recipe", "").split(",")
    ):
        return words
    words = [
        "++" + word.lstrip("+") if word.lstrip("+").startswith("recipe.") else word
        for word in words
    ]
    return words if "recipe" in keys else ["recipe=custom", *words]


@dataclass
class Findings:
    """All that is wrong with a command line; how many jobs it asks for (None: a sweeper decides),
    and the output folder.
    """

    problems: list[str] = field(default_factory=list)
    jobs: int | None = 1
    output_dir: str = ""


def look(
    words: list[str],
    multirun: bool = False,
    config_dir: str | None = None,
    done: Done | None = None,
) -> Findings:
    """Check every job that these overrides ask for, in well under a second: one composition for
    each option of a group. ``done``, where several sweeps of one command line are looked at, keeps
    these compositions from one look to the next.
    """
    findings = Findings()
    search_path = create_config_search_path("pkg://nmrun.conf")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            findings.problems.append(f"--config-dir {config_dir}: no such folder")
        else:
            search_path.prepend(
                "command-line",
                f"file://{Path(config_dir).absolute()}",
                SearchPathQuery(provider="schema"),
            )
    GlobalHydra.instance().clear()
    try:
        Hydra.create_main_hydra2("nmrun", search_path)
        _Look(words, multirun, findings, {} if done is None else done).check_jobs()
    except (HydraException, OmegaConfBaseException) as error:
        findings.problems.append(str(error).splitlines()[0])
    except ConfigError as error:
        findings.problems += error.problems
    finally:
        GlobalHydra.instance().clear()
    findings.problems = list(dict.fromkeys(findings.problems))
    return findings


class _Look:
    """One look at a command line, while Hydra is initialized. Whatever is wrong goes to
    ``findings``, and the look goes on.
    """

    def __init__(self, words: list[str], multirun: bool, findings: Findings, done: Done) -> None:
        self.findings, self._done = findings, done
        self.chosen: dict[
            str, list[Any]
        ] = {}  # the options that exist, of each group on the command line
        self.values: dict[str, list[Any]] = {}  # of keys
        # groups with a wrong option: nothing is concluded from what stands in for it
        self.unsure: set[str] = set()
        overrides = self._parsed(words)
        self.for_hydra = [
            o.input_line or ""
            for o in overrides
            if o.is_delete() or o.key_or_group.startswith("hydra")
        ]
        self.written = {o.key_or_group: o for o in overrides if o.input_line not in self.for_hydra}
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        search_path = [word for word in self.for_hydra if word.startswith("hydra.searchpath")]
        names = loader.get_group_options("", ObjectType.GROUP, overrides=search_path)
        self.groups = {
            name: loader.get_group_options(name, overrides=search_path)
            for name in names
            if name != "hydra"
        }
        self.sweeper = any(word.startswith("hydra/sweeper") for word in self.for_hydra)
        if self.sweeper:
            findings.jobs = None
        for key, override in self.written.items():
            self._read(key, override, multirun)

    def _parsed(self, words: list[str]) -> list[Override]:
        parsed, rest = [], list(words)
        while rest:
            word = rest.pop(0)
            try:
                parsed.append(OverridesParser.create().parse_override(word))
            except HydraException:
                while rest and "=" not in rest[0] and word.count("{") > word.count("}"):
                    word += f" {rest.pop(0)}"  # the shell cut it at its spaces
                self.findings.problems.append(f"{word}: cannot be read as key=value{quoting(word)}")
        return parsed

    def _read(self, key: str, override: Override, multirun: bool) -> None:
        """What an override asks for: of a group its options, of a key its values."""
        problems, options = self.findings.problems, self.groups.get(key)
        value, several = override.value(), list[Any]()
        if isinstance(value, IntervalSweep):
            several = [value.start, value.end]
            if not self.sweeper:
                problems.append(
                    f"{override.input_line}: an interval needs a sweeper, such as hydra/sweeper=optuna"
                )
        elif isinstance(value, Glob):
            several = value.filter(options or [])
        else:
            sweep = override.is_sweep_override()
            several = (
                [Override._convert_value(one) for one in override.sweep_iterator()]
                if sweep
                else [value]
            )
        if override.is_sweep_override() and not multirun:
            problems.append(f"{override.input_line}: several values make a sweep; add -m")
        if not several:
            problems.append(
                f"{override.input_line}: matches nothing (there are {', '.join(options or [])})"
            )
        if self.findings.jobs is not None:
            self.findings.jobs *= len(several)
        if options is None:
            self.values[key] = several
            return
        wrong = {
            _word(one): line for one in several if (line := _wrong_option(key, _word(one), options))
        }
        if wrong:
            problems += wrong.values()
            self.unsure.add(key)
        if len(wrong) < len(several):
            self.chosen[key] = [one for one in several if _word(one) not in wrong]

    def check_jobs(self) -> None:
        """Put each job together, from the options of groups and the values of keys, and check it."""
        first = {group: options[0] for group, options in self.chosen.items()}
        swept = {group: options for group, options in self.chosen.items() if len(options) > 1}
        base = self._composed(first)
        variants = {
            (group, _word(option)): base
            if option == first[group]
            else self._composed({**first, group: option})
            for group, options in swept.items()
            for option in options
        }
        self._drop_unknown(base, variants.values())
        plain = self._resolved(base)
        # what an option puts into the config: its group; of an overlay, which has no group of its
        # own, all that it changes
        parts = {}
        for (group, option), variant in variants.items():
            full = self._resolved(variant)
            own = (
                [group] if group in plain else [key for key in full if full[key] != plain.get(key)]
            )
            parts[group, option] = {key: full[key] for key in own}
        self.findings.output_dir = str(plain.get("output_dir"))

        # an overlay gives way to a group of the command line
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
                group = key.partition(".")[0]
                if (
                    not _put(config, key, choice[key], _adds(self.written[key]))
                    and group not in self.unsure
                ):
                    self.findings.problems.append(
                        f"{key}: no such key with {group}={choice.get(group)}"
                    )
            self.findings.problems += schema.problems(config, self.unsure)

    def _composed(self, choices: dict[str, Any]) -> DictConfig:
        """The config with these options of groups, before the values of keys."""
        ratio = choices.get(RATIO)
        if ":" in str(ratio):  # a ratio needs no composition of its own
            config = self._composed({**choices, RATIO: "dense"}).copy()
            pattern = Pattern.parse(str(ratio))
            OmegaConf.update(config, RATIO, {"n": pattern.n, "m": pattern.m})
            return config
        chosen = (
            f"{'+' if self.written[g].is_add() else ''}{g}={_word(option)}"
            for g, option in choices.items()
        )
        words = (*self.for_hydra, *chosen)
        if words not in self._done:
            self._done[words] = compose("nmrun", list(words))
        return self._done[words]

    def _resolved(self, config: DictConfig) -> dict[str, Any]:
        """Plain data, with the first value of each key in it, so that what refers to it resolves."""
        config = config.copy()
        for key, several in self.values.items():
            if several and (
                _adds(self.written[key])
                or OmegaConf.select(config, key, default=_word) is not _word
            ):
                OmegaConf.update(config, key, several[0], force_add=True)
        return schema.resolve(config)

    def _drop_unknown(self, base: DictConfig, variants: Iterable[DictConfig]) -> None:
        known = {
            key
            for config in map(_raw, (base, *variants))
            for key in (*config, *schema.flatten(config))
        }
        for key, override in self.written.items():
            if override.is_add() and key in self.values and key in known:
                self.findings.problems.append(
                    f"{override.input_line}: {key} is there already; write it without +"
                )
            if (
                key in self.values
                and key not in known
                and not _adds(override)
                and key.partition(".")[0] not in self.unsure
            ):
                self.findings.problems.append(_unknown(key, known | set(self.groups)))
                del self.values[key]


def _adds(override: Override) -> bool:
    return override.is_add() or override.is_force_add()


def _word(option: Any) -> str:
    return "null" if option is None else str(option)


def _raw(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return dict(plain)


def _put(config: dict[str, Any], key: str, value: Any, add: bool) -> bool:
    """Set a dotted key; False if it is not there and not to be added."""
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
        return None
    if option in options or os.sep in option:
        return None
    return reader.no_option(group, group, option, options)


def _unknown(key: str, known: set[str]) -> str:
    """The line for a key that is nowhere. Its nearest match is beside it, or has the same last part
    (lr for optimizer.lr).
    """
    if key.startswith(f"{RATIOS}."):
        return f"{key}: no such key; ratios by layer are one value: '{RATIOS}={{{key.removeprefix(RATIOS)[1:]}: 1:8}}'"
    group, _, leaf = key.rpartition(".")
    beside = {one for one in known if one.rpartition(".")[0] == group}
    line = reader.no_key(key, beside or {one for one in known if "." not in one})
    same = sorted(one for one in known if one.rpartition(".")[2] == leaf)
    return (
        line
        if "did you mean" in line or not same
        else line.replace("no such key", f"no such key; did you mean {same[0]}?", 1)
    )
