"""What every verb of the command line shares: the option parser, and errors of files.

A verb raises ConfigError for a mistake in the command and RunError for work that failed. The
command line prints either as one line, ``nmrun: ...``, and exits with status 2 or 1.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

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
        parts = (str(part) for part in (error.filename, error.strerror) if part)
        raise ConfigError(": ".join(parts) or str(error)) from None
