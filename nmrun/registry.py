"""Classes and functions by name: built-in ones, or a user's own by the dotted path."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from nmrun.errors import ConfigError


def find(kind: str, name: str, known: Mapping[str, str]) -> Any:
    """Import the object that a name stands for.

    Args:
        kind: the key of the config that has the name, such as ``model.name``, for the error.
        name: a name of ``known``, or a dotted path.
        known: the dotted path of each built-in name.

    Returns:
        The object.

    Raises:
        ConfigError: for an unknown name, with the nearest one, and for a path that cannot be
            imported.
    """
    if name in known:
        module, _, attribute = known[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    if "." not in name:
        hint = did_you_mean(name, known)
        what = kind.partition(".")[0]
        raise ConfigError(f"{kind}={name}: no such {what}{hint} (there are {', '.join(known)})")
    try:
        return imported(name, f"{kind}={name}")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def imported(path: str, what: str) -> Any:
    """Import an object by its dotted path; modules of the current folder are found too.

    Args:
        path: ``package.module.name``.
        what: the beginning of the error's message.

    Returns:
        The object.

    Raises:
        ValueError: where it cannot be imported.
    """
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} cannot be imported: {error}") from None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Ask whether a similar option was meant.

    Swapped letters are the most frequent mistake, so an anagram is preferred.

    Args:
        word: the unknown word.
        options: the known words.

    Returns:
        ``"; did you mean ...?"``, or an empty string where no option is similar.
    """
    options = list(options)
    meant = [option for option in options if sorted(option) == sorted(word)]
    if not meant and options:
        import difflib  # only for a mistake

        meant = difflib.get_close_matches(word, options, 1)
    return f"; did you mean {meant[0]}?" if meant else ""
