"""Reads plain data by the classes of the groups, whose annotations hold the ranges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from nmrun.errors import ConfigError
from nmrun.registry import did_you_mean

Keys = TypeVar("Keys")


def built(kind: type[Keys], plain: Mapping[str, Any], group: str) -> Keys:
    """The class with the values of ``plain``, whose other keys are left out.

    Args:
        kind: a class of a group.
        plain: the group as plain data.
        group: its name, for the error.

    Raises:
        ConfigError: with each key that is not there.
    """
    keys = [key.name for key in dataclasses.fields(cast(Any, kind))]
    if missing := [key for key in keys if key not in plain]:
        raise ConfigError([f"{group}.{key}: missing" for key in missing])
    return kind(**{key: plain[key] for key in keys})


def wrong_keys(group: str, known: Iterable[str], given: Iterable[str]) -> dict[str, str]:
    """The keys that a group lacks or should not have: each problem with its key."""
    names, there = [f"{group}.{key}" for key in known], [f"{group}.{key}" for key in given]
    wrong = {f"{name}: missing": name for name in names if name not in there}
    return wrong | {no_key(name, names): name for name in there if name not in names}


def no_key(key: str, known: Iterable[str]) -> str:
    """The line for a key that does not exist; ``known`` are those beside it."""
    known = list(known)
    return f"{key}: no such key{did_you_mean(key, known)} ({listed(key, known)})"


def listed(key: str, known: Iterable[str]) -> str:
    """The keys beside one, in words: ``optimizer has lr, name``."""
    group = key.rpartition(".")[0]
    has = ", ".join(name.rpartition(".")[2] for name in sorted(known))
    return f"{group} has {has}" if group else f"there are {has}"


def no_option(key: str, group: str, option: str, options: Iterable[str]) -> str:
    """The line for an option that a group does not have."""
    hint = did_you_mean(option, options)
    return f"{key}={option}: no such {group}{hint} (there are {', '.join(options)})"
