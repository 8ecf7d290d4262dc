"""What every verb of the command line shares: the option parser, errors of files, and consent to the
code that a run folder names.

A verb raises ConfigError for a mistake in the command and RunError for work that failed. The
command line prints either as one line, ``nmrun: ...``, and exits with status 2 or 1.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from nmrun import atomic
from nmrun.errors import ConfigError
from nmrun.ranges import Check
from nmrun.registry import did_you_mean


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ConfigError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            hint = did_you_mean(unknown[1], self._option_string_actions)
            hint = hint or f"; {self.prog} --help lists what it takes"
        raise ConfigError(f"{message}{hint}")


def in_range(kind: Callable[[str], Any], check: Check) -> Callable[[str], Any]:
    """The ``type=`` of an option: what ``kind`` makes of its text, where that is in range."""

    def value(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if check.holds(made := kind(text)):
                return made
        raise argparse.ArgumentTypeError(f"{text}: it takes {check.allowed}")

    return value


@contextlib.contextmanager
def files_of_the_command() -> Iterator[None]:
    """Turn errors of files into mistakes in the command, while entered."""
    try:
        yield
        sys.stdout.flush()  # which may find the disk full
    except OSError as error:
        if error.errno in atomic.FULL:  # no mistake of the user's
            raise
        parts = (str(part) for part in (error.filename, error.strerror) if part)
        raise ConfigError(": ".join(parts) or str(error)) from None


# --- consent --------------------------------------------------------------------------------------

# What a folder's config has as ``_target_`` is imported and called, and it may come from anybody.
BUILT = ("dataset", "model")  # the groups that a network needs


def consent_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes`` to a verb that builds a run's network."""
    text = "import the code that the run names (dataset._target_, model._target_)"
    parser.add_argument("--yes", action="store_true", help=text)


def code_of(config: Mapping[str, Any], groups: Iterable[str] = BUILT) -> list[str]:
    """The ``_target_`` of each of these groups, but for recipes that an installed package
    registers. Any other counts: among what is installed there are functions that load anything."""
    from nmrun.recipes import installed  # which --help need not wait for

    targets = (config.get(group, {}).get("_target_") for group in groups)
    registered = {None, *installed().values()}
    return [str(target) for target in targets if target not in registered]


def demand_consent(
    folder: object, config: Mapping[str, Any], consent: bool, groups: Iterable[str] = BUILT
) -> None:
    """Raise ConfigError for a config that names code, without the user's ``consent``."""
    if not consent and (targets := code_of(config, groups)):
        raise ConfigError(
            f"{folder}: the run imports {', '.join(targets)}, which may do anything; --yes says that "
            "you trust it"
        )
