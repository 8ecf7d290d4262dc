"""Data sets and models of other installed packages, which say of them what nmrun does of its own.

A package adds a name by an entry point of the group ``nmrun.datasets`` or ``nmrun.models``, such as
``tumours = "mypkg.keys:TUMOURS"``. A name of nmrun's own is not theirs to take.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Generic, TypeVar

from nmrun import registry
from nmrun.errors import ConfigError
from nmrun.lab.keys.groups import Named

Kind = TypeVar("Kind", bound=Named)
GROUPS = ("dataset", "model")


@dataclass(frozen=True)
class Entry:
    """What an entry point names; its module imports no torch.

    Attributes:
        keys: the dataclass of the keys, a ``Dataset`` or ``Model``.
        builder: the dotted path of what builds it.
        conf: the package whose ``dataset/NAME.yaml`` or ``model/NAME.yaml`` has meanings and
            defaults.
    """

    keys: type[Named]
    builder: str
    conf: str


def points(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group of the config by name; none is imported."""
    return registry.installed(f"nmrun.{group}s")


@functools.cache
def entry(group: str, name: str) -> Entry:
    """What an installed package says of ``group=name``.

    Raises:
        ConfigError: where the package cannot be imported, or names something else.
    """
    point = points(group)[name]
    try:
        said = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{group}={name}: {point.value} cannot be imported: {error}") from None
    if not isinstance(said, Entry):
        raise ConfigError(f"{group}={name}: {point.value} is no {__name__}.Entry")
    return said


def preset(group: str, name: str) -> Traversable:
    """The YAML of an installed package's option.

    Raises:
        ConfigError: as :func:`entry`, and where there is no such file.
    """
    conf = entry(group, name).conf
    try:
        file = files(conf) / group / f"{name}.yaml"
    except ImportError as error:
        raise ConfigError(f"{group}={name}: {conf} cannot be imported: {error}") from None
    if not file.is_file():
        raise ConfigError(f"{group}={name}: {conf} has no {group}/{name}.yaml")
    return file


def builder(group: str, name: str, own: Mapping[str, str]) -> Any:
    """What builds ``group=name``, of nmrun's ``own`` or an installed package's.

    Raises:
        ConfigError: for an unknown name.
    """
    others = {name: entry(group, name).builder} if name in points(group) else {}
    return registry.find(f"{group}.name", name, {**others, **own})


class Kinds(Mapping[str, type[Kind]], Generic[Kind]):
    """The classes of keys by name: ``own``, then those of installed packages, which are imported
    as they are asked for.
    """

    def __init__(self, group: str, own: dict[str, type[Kind]]) -> None:
        self.group, self.own = group, own

    def __getitem__(self, name: str) -> type[Kind]:
        if name in self.own:
            return self.own[name]
        if name not in points(self.group):
            raise KeyError(name)
        kind: Any = entry(self.group, name).keys
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **points(self.group)})

    def __len__(self) -> int:
        return len({**self.own, **points(self.group)})
