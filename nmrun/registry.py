"""Classes and functions by name: built-in ones, those of installed packages, or a user's own by the
dotted path."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError, refused

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find(kind: str, name: str, paths: Mapping[str, str]) -> Any:
    """Import the object that a name of ``paths``, or a dotted path, stands for. ``kind``: the key
    that has the name, such as ``model.name``. Raises ConfigError for an unknown name, with the
    nearest one, and for a path that cannot be imported."""
    if name in paths:
        module, _, attribute = paths[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    if "." not in name or name.startswith("."):
        choose(kind, name, paths)
    with refused("", ValueError):
        return imported(name, f"{kind}={name}")


def imported(path: str, what: str) -> Any:
    """Import an object by its dotted path; modules of the current folder are found too. Raises
    ValueError where it cannot be imported."""
    module, _, attribute = path.rpartition(".")
    see_current_folder()
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} cannot be imported: {error}") from None
    except SystemExit:  # a script of the user's, which would end a sweep with it
        raise ValueError(
            f"{what} cannot be imported: {module} ends the program; put what it does as a script "
            'below if __name__ == "__main__"'
        ) from None


def see_current_folder() -> None:
    """Let modules of the current folder be found."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


@functools.cache
def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, such as ``nmrun.recipes``, by name; none is imported."""
    return {point.name: point for point in sorted(_entry_points().select(group=group))}


@functools.cache
def _entry_points() -> Any:
    """Those of all groups, since each look goes through all installed packages."""
    from importlib.metadata import entry_points

    return entry_points()


@functools.cache
def version_of(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


# what values are called elsewhere
ALSO = {
    "gpu": "cuda",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
    "tb": "tensorboard",
    "none": "local",
    "sparsity": "pattern",  # a word of commands, and nmrun.sparsify's
}


def choose(key: str, name: str, options: Collection[str]) -> str:
    """Return the name. Raise ConfigError where it is none of the options of ``key``, such as
    ``model.name``."""
    if name not in options:
        group = key.partition(".")[0]
        raise ConfigError(f"{key}={name}: {no_such(group, name, options, f'nmrun help {group}')}")
    return name


FEW = 8  # names that a line has room for


def no_such(
    what: str, name: str, options: Collection[str], every: str = "", hint: str | None = None
) -> str:
    """``no such recipe; did you mean step? (nmrun help recipe lists all)``, of a name that is none of
    the options. ``every``: the command that lists them; ``hint``: what was meant, where more than
    letters says it, as in :func:`did_you_mean`."""
    hint = did_you_mean(name, options) if hint is None else hint
    if len(options) <= FEW:
        listing = f"there are {', '.join(options)}" if options else ""
    elif hint:
        listing = f"{every} lists all" if every else ""
    else:
        some = ", ".join(itertools.islice(options, FEW))
        listing = f"there are {some}, ..." + (f"; {every} lists all" if every else "")
    return f"no such {what}{hint}" + (f" ({listing})" if listing else "")


def unknown_hyperparameters(
    owner: str, given: Iterable[str], known: Collection[str], others: Iterable[str]
) -> list[str]:
    """A line for each hyperparameter that is none of the known ones. ``others``: what else may have
    been meant."""
    nearby = [*known, *others]
    return [
        f"{owner}: {key}: {no_such('hyperparameter', key, known, hint=did_you_mean(key, nearby))}"
        for key in given
        if key not in known
    ]


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """``"; did you mean ...?"``, or an empty string where no option is near."""
    meant = nearest(word, options)
    return f"; did you mean {meant}?" if meant else ""


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option that was probably meant, or None. In this order: what it is called elsewhere, the
    same but for capitals and dashes, the same letters in another order, similar letters, the word inside it."""
    by_letters: dict[str, str] = {}
    for option in options:
        by_letters.setdefault(_letters(option), option)
    letters = _letters(word)
    meant = [_letters(ALSO.get(letters, letters)), letters]
    meant += [each for each in by_letters if sorted(each) == sorted(letters)]
    if not any(each in by_letters for each in meant):
        import difflib  # only for a mistake

        meant += difflib.get_close_matches(letters, by_letters, 1, 0.65)
        meant += [each for each in by_letters if len(letters) > 2 and letters in each]
    return next((by_letters[each] for each in meant if each in by_letters), None)


def _letters(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
