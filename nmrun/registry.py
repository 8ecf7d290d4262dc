"""Things by their name: one of those known here, or the user's own by its dotted path."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from nmrun.errors import ConfigError


def find(kind: str, name: str, known: Mapping[str, str]) -> Any:
    """What ``name`` stands for, imported.

    Args:
        kind: the key that names it, for the error: ``model.name``, say.
        name: a name of ``known``, or a dotted path.
        known: names, and the dotted path of each.

    Raises:
        ConfigError: for a name that is not known, with the nearest one, and for what cannot be
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
    """What ``package.module.name`` names, also in a module of the current folder.

    Raises:
        ValueError: that begins with ``what``.
    """
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} cannot be imported: {error}") from None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """The option that was probably meant, as a question; else nothing.

    Swapped letters are the commonest slip, so an anagram wins.
    """
    options = list(options)
    meant = [option for option in options if sorted(option) == sorted(word)]
    if not meant and options:
        import difflib  # only for a mistake

        meant = difflib.get_close_matches(word, options, 1)
    return f"; did you mean {meant[0]}?" if meant else ""
