"""The text of ``nmrun help``: about a key, a group, or one of a group's options."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from nmrun.errors import ConfigError
from nmrun.lab.words import reference
from nmrun.lab.words.reference import Key, Option
from nmrun.registry import did_you_mean


def about(topic: str, config_dir: str | None = None) -> str:
    """What a topic means, which values it takes and what it is by default.

    Args:
        topic: a key (``trainer.epochs``, ``seed``), a group (``trainer``, ``recipe``) or an option
            (``recipe=step``, ``step``).
        config_dir: a folder of more configs.

    Raises:
        ConfigError: for any other word, with the nearest that there is.
    """
    group, equals, name = topic.partition("=")
    if group in reference.GROUPS:
        options = reference.options(group, config_dir)
        if equals and group != "sparsity":  # any ratio is an option there
            return "\n".join(_option(_named(options, group, name)))
        return "\n".join(_option(options[0]) if not options[0].name else _list(options))
    group = topic.partition(".")[0] if "." in topic else ""
    if group in ("", *reference.GROUPS):
        alike = reference.alike(topic, reference.options(group))
        if alike:
            return "\n".join([topic, *(line for meant in alike.items() for line in _key(*meant))])
    named = [
        option
        for group in reference.GROUPS
        for option in reference.options(group, config_dir)
        if option.name == topic
    ]
    if named:
        return "\n".join(line for option in named for line in _option(option))
    raise ConfigError(f"{topic}: no such key, group or option{_hint(topic)}")


def _named(options: list[Option], group: str, name: str) -> Option:
    for option in options:
        if option.name == name:
            return option
    names = [option.name for option in options if option.name]
    there = f" (there are {', '.join(names)})" if names else ""
    raise ConfigError(f"{group}={name}: no such {group}{did_you_mean(name, names)}{there}")


def _hint(topic: str) -> str:
    keys = [
        key.name
        for group in ("", *reference.GROUPS)
        for option in reference.options(group)
        for key in option.keys
    ]
    ending = dict.fromkeys(key for key in keys if key.endswith(f".{topic}"))
    if ending:
        return f"; did you mean {' or '.join(ending)}?"
    return did_you_mean(topic, [*keys, *reference.GROUPS])


def _list(options: Iterable[Option]) -> Iterator[str]:
    """A group's options, a paragraph each."""
    for option in options:
        yield from _wrapped(f"{option.group}={option.name}: {option.about}", "", "    ")


def _option(option: Option) -> Iterator[str]:
    yield option.group + (f"={option.name}" if option.name else "")
    for paragraph in re.split(r"\n\n", option.more or option.about):
        if re.search(r"^(?:    |- )", paragraph, re.M):  # a formula or a list stays as it is
            yield from textwrap.indent(_plain(paragraph), "  ").splitlines()
        else:
            yield from _wrapped(paragraph, "  ", "  ")
    for key in option.keys:
        yield key.name
        yield from _wrapped(key.meaning, "  ", "  ")
        yield from _values(key, f"default {key.default}")


def _key(key: Key, defaults: dict[str, list[str]]) -> Iterator[str]:
    """One meaning of a key: the options that have it by their defaults."""
    names = [name for alike in defaults.values() for name in alike if name]
    yield from _wrapped(f"of {', '.join(names)}: " * bool(names) + key.meaning, "  ", "  ")
    few = len(defaults) == 1
    shown = (value if few else f"{value} ({', '.join(of)})" for value, of in defaults.items())
    yield from _values(key, f"default {'; '.join(shown)}")


def _values(key: Key, default: str) -> Iterator[str]:
    takes = f"takes {key.takes}; " if key.takes else ""
    yield from _wrapped(takes + default, "    ", "    ")


def _wrapped(text: str, first: str, other: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return textwrap.wrap(
        _plain(text), width, initial_indent=first, subsequent_indent=other,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _plain(text: str) -> str:
    """Without the marks of reStructuredText."""
    return re.sub(r"::$|:\w+:(?=`)|`+~?", lambda mark: ":" * (mark[0] == "::"), text, flags=re.M)
