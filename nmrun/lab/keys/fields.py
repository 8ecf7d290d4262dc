"""The keys of a group as dataclass fields: type, range, default and meaning of a key stand in one.

::

    lr: Annotated[float, number(0, open_low=True), "learning rate, which the schedule scales"] = 1e-3

A class may give an inherited key another default, another meaning or another range; what it leaves
out is as above it: ``lr: float = 0.05``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from nmrun.errors import ConfigError
from nmrun.ranges import Check, Search

Keys = TypeVar("Keys")


@dataclass(frozen=True)
class Field:
    """A key: its default as YAML reads it, its range, where ``nmrun tune`` looks for it, its
    meaning.

    ``default`` is None as well where the user has to give a value. Without a ``check`` it takes any
    value, without a ``search`` it is not tuned.
    """

    default: Any
    check: Check | None
    search: Search | None = None
    meaning: str = ""


@dataclass(frozen=True)
class RecipeFacts:
    """What is on a recipe's class. ``about`` and ``module`` are the docstrings of both."""

    title: str
    takes_blocks: bool  # V:N:M patterns
    about: str
    module: str
    keys: Mapping[str, Field]


@functools.cache
def fields(kind: type) -> Mapping[str, Field]:
    """The keys of a class beside ``name``: first its own, then those of each class above it."""
    above = kind.__mro__
    first = {key: place for place, base in enumerate(above) for key in _annotations(base)}
    stated: dict[str, dict[type, Any]] = {}  # a check, a search and a text, by their types
    for base in reversed(above):
        for name, annotation in _annotations(base).items():
            parts = {type(part): part for part in getattr(annotation, "__metadata__", ())}
            stated[name] = stated.get(name, {}) | parts
    keys = {}
    for key in sorted(dataclasses.fields(cast(Any, kind)), key=lambda key: first[key.name]):
        if key.init:  # else it is state of a recipe
            default = None if key.default is dataclasses.MISSING else as_yaml(key.default)
            said = stated[key.name]
            keys[key.name] = Field(default, said.get(Check), said.get(Search), said.get(str, ""))
    keys.pop("name", None)
    return keys


@functools.cache
def _annotations(base: type) -> dict[str, Any]:
    return inspect.get_annotations(base, eval_str=True)


def as_yaml(value: Any) -> Any:
    """A default as YAML has it: a list for a tuple."""
    return [as_yaml(item) for item in value] if isinstance(value, tuple | list) else value


def defaults(keys: Mapping[str, Field]) -> dict[str, Any]:
    return {key: field.default for key, field in keys.items()}


def built(kind: type[Keys], plain: Mapping[str, Any], group: str) -> Keys:
    """The class with the values of ``plain``, whose other keys are left out.

    Raises ConfigError with each key of ``group`` that is not there.
    """
    keys = [key.name for key in dataclasses.fields(cast(Any, kind))]
    if missing := [key for key in keys if key not in plain]:
        raise ConfigError([f"{group}.{key}: missing" for key in missing])
    return kind(**{key: plain[key] for key in keys})
