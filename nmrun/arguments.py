"""The options of the verbs: a mistake in them is an error like any other.

A verb raises ConfigError for a mistake in the command and RunError for work that failed. The
command line prints either as one line, ``nmrun: ...``, and exits with status 2 or 1.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import NoReturn

from nmrun.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@contextlib.contextmanager
def files_of_the_command() -> Iterator[None]:
    """While entered, a file that cannot be read or written is a mistake in the command.

    Raises:
        ConfigError: with the file and the reason.
    """
    try:
        yield
    except OSError as error:
        known = (str(part) for part in (error.filename, error.strerror) if part)
        raise ConfigError(": ".join(known) or str(error)) from None
