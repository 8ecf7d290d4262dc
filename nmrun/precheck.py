"""Looks at the command line before Hydra does, so that a typo costs one helpful line instead of a traceback."""

from __future__ import annotations

import difflib
import os
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun import schema
from nmrun.config_source import GROUP
from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError

PLAIN_FLAGS = {"-m", "--multirun"}


def problems(argv: list[str]) -> tuple[list[str], int, str]:
    """All that is wrong with these overrides, the number of jobs they ask for, and the output folder.

    A sweep is checked value by value, not job by job: a few compositions instead of hundreds. What only a certain combination
    gets wrong is told by that job, and does not stop the others.
    """
    words = [word for word in argv if word not in PLAIN_FLAGS]
    multirun = len(words) < len(argv)
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        return [str(error).splitlines()[0]], 0, ""
    GlobalHydra.instance().clear()
    with initialize_config_module("nmrun.conf", version_base="1.3"):
        return _problems(overrides, multirun)


def _problems(overrides: list[Override], multirun: bool) -> tuple[list[str], int, str]:
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    groups = {
        group: loader.get_group_options(group) for group in loader.get_group_options("", ObjectType.GROUP) if group != "hydra"
    }
    found: list[str] = []
    jobs = 1
    other: list[str] = []  # what is for Hydra itself
    choices: dict[str, list[Any]] = {}  # good options of groups
    values: dict[str, list[Any]] = {}
    for override in overrides:
        key = override.key_or_group
        if key.partition("/")[0].partition(".")[0] == "hydra" or override.is_delete() or override.is_add():
            other.append(str(override.input_line))
            continue
        options = _values(override, groups.get(key, []))
        if len(options) > 1 and not multirun:
            found.append(f"{override.input_line}: several values make a sweep; add -m")
        jobs *= len(options)
        if key in groups:
            found += [line for option in options if (line := _wrong_choice(key, option, groups[key]))]
            choices[key] = options
        elif options:
            values[key] = options
    if found:  # with a bad choice nothing can be composed; unknown keys and bad values can still be told
        choices = {
            key: good
            for key, options in choices.items()
            if (good := [o for o in options if not _wrong_choice(key, o, groups[key])])
        }
    try:
        configs = _variants(other, choices)
    except (HydraException, OmegaConfBaseException) as error:
        return [*found, str(error).splitlines()[0]], jobs, ""
    known = set().union(*({*schema.flatten(_plain(config)), *_plain(config)} for _, config in configs))
    unknown = [key for key in values if key not in known]
    found += [_unknown_key(key, sorted(known | set(groups))) for key in unknown]
    values = {key: options for key, options in values.items() if key not in unknown}
    for label, config in configs:
        missing = [key for key in values if OmegaConf.select(config, key, default=_plain) is _plain]
        found += [f"{key}: no such key with {label}" for key in missing]
        for key, options in values.items():
            if key not in missing:
                OmegaConf.update(config, key, options[0])
        found += _checked(config)
    base = configs[0][1]
    for key, options in values.items():
        for option in options[1:] if OmegaConf.select(base, key, default=_plain) is not _plain else []:
            config = base.copy()
            OmegaConf.update(config, key, option)
            found += _checked(config)
    return list(dict.fromkeys(found)), jobs, str(base.output_dir)


def _variants(other: list[str], choices: dict[str, list[Any]]) -> list[tuple[str, DictConfig]]:
    """The config with the first option of every group, then one for each further option, with a word on which it is."""
    first = {group: options[0] for group, options in choices.items()}
    base = compose("nmrun", [*other, *(f"{group}={_word(option)}" for group, option in first.items())])
    configs = [(" ".join(f"{g}={o}" for g, o in first.items()) or "the defaults", base)]
    for group, options in choices.items():
        for option in options[1:]:
            if group == GROUP and ":" in str(option) and base[GROUP].n is not None:
                config = base.copy()
                config[GROUP].n, config[GROUP].m = Pattern.parse(str(option)).n, Pattern.parse(str(option)).m
            else:
                config = compose("nmrun", [*other, *(f"{g}={_word(o)}" for g, o in {**first, group: option}.items())])
            configs.append((f"{group}={option}", config))
    return configs


def _plain(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


def _checked(config: DictConfig) -> list[str]:
    try:
        schema.check(config)
    except ConfigError as error:
        return error.problems
    return []


def _values(override: Override, options: list[str]) -> list[Any]:
    """The values an override stands for; several for a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if isinstance(override.value(), Glob):
        return override.value().filter(options)  # type: ignore[union-attr]
    return list(override.sweep_iterator())


def _word(option: Any) -> str:
    return "null" if option is None else str(option)


def _wrong_choice(group: str, option: Any, options: list[str]) -> str | None:
    text = _word(option)
    if group == GROUP and text != "dense":
        try:
            Pattern.parse(text)
        except PatternError as error:
            return f"sparsity={text}: {error}; or dense" if "two numbers" in str(error) else f"sparsity={text}: {error}"
        return None
    if text in options or (option is None and group == "debug") or os.sep in text:
        return None
    return f"{group}={text}: no such {group}{_near(text, options)} (there are {', '.join(options)})"


def _unknown_key(key: str, known: list[str]) -> str:
    head = key.rpartition(".")[0]
    siblings = [k for k in known if k.startswith(head + ".")] if head else [k for k in known if "." not in k]
    listed = ", ".join(k.rpartition(".")[2] for k in siblings)
    hint = _near(key, siblings or known) or _near(key, known)
    return f"{key}: no such key{hint}" + (
        f" ({head} has {listed})" if head and siblings else f" (there are {listed})" if listed else ""
    )


def _near(word: str, options: list[str]) -> str:
    """The option that was probably meant. Swapped letters are the commonest slip, so an anagram wins."""
    anagrams = [option for option in options if sorted(option) == sorted(word)]
    near = anagrams or difflib.get_close_matches(word, options, 1)
    return f"; did you mean {near[0]}?" if near else ""
