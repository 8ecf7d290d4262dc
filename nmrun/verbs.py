"""What every verb has: options whose mistakes are errors like any other, and output that may be
cut.

A verb raises ConfigError for a mistake in the command and RunError for work that failed. The
command line prints either as one line, ``nmrun: ...``, and exits with status 2 or 1. Where the
reader of standard output goes (``nmrun ... | head``), the program ends quietly. The signal itself,
SIGPIPE, is no way to have that: it would also end a run whose connection to W&B breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

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


STATUS = 128 + 13  # what a shell tells of a program that SIGPIPE ended


class _Stream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._reader():
            # what stands in for a stream elsewhere need not say how much it wrote
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._reader():
            self._stream.flush()

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            # for what is still in the buffer, and is said on the way out
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            raise SystemExit(STATUS) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """While entered, writing to where nobody reads any more raises SystemExit(141), on standard
    output and standard error.
    """
    with (
        contextlib.redirect_stdout(_Stream(sys.stdout)),
        contextlib.redirect_stderr(_Stream(sys.stderr)),
    ):
        try:
            yield
        finally:
            sys.stdout.flush()
