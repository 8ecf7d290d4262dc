"""What every verb of the command line shares: the option parser, and a quiet end of the output.

A verb raises ConfigError for a mistake in the command and RunError for work that failed. The
command line prints either as one line, ``nmrun: ...``, and exits with status 2 or 1. Where the
reader of standard output closes it (``nmrun ... | head``), the program ends quietly, a run once its
checkpoint is saved. Python's default for the signal SIGPIPE stays, since otherwise a broken connection to W&B would end a run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from nmrun.errors import ConfigError
from nmrun.lab.signals import end_run


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ConfigError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with this message."""
        raise ConfigError(message)


@contextlib.contextmanager
def files_of_the_command() -> Iterator[None]:
    """Turn errors of files into mistakes in the command, while the context is entered.

    Raises:
        ConfigError: where a file cannot be read or written, with the file and the reason.
    """
    try:
        yield
    except OSError as error:
        known = (str(part) for part in (error.filename, error.strerror) if part)
        raise ConfigError(": ".join(known) or str(error)) from None


def agreed(verb: str, question: str) -> bool:
    """Ask, and return whether the answer is yes.

    Raises:
        ConfigError: where there is nobody to ask.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"{verb}: {question} Nobody to ask here; --yes is the answer")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


STATUS = 128 + signal.SIGPIPE  # which shells give a program that the signal ended


QUIET = 30.0  # seconds
_waiting: list[Any] = []  # the stream of the line of waiting(), until something takes its place


def waiting(text: str) -> None:
    """Show on a terminal what takes a moment, until the next line takes its place. Elsewhere it is a
    line of its own, where there was none for ``QUIET`` seconds.
    """
    stream = sys.stdout
    if not isinstance(stream, _Stream):
        return
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        stream.write(f"{text} ...")
        stream.flush()
        _waiting.append(stream)
    elif time.monotonic() - stream.written >= QUIET:
        print(f"{text} ...", flush=True)


def no_longer_waiting() -> None:
    """Take away what :func:`waiting` shows."""
    while _waiting:
        _waiting.pop().write("\r\x1b[K")


class _Stream:
    def __init__(self, stream: Any) -> None:
        self._stream, self.written = stream, time.monotonic()

    def write(self, text: str) -> int:
        no_longer_waiting()
        self.written = time.monotonic()
        with self._reader():
            # a replaced stream (a notebook's, pytest's) need not return how much it wrote
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
            # Python flushes the buffer at exit, which would raise again
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if not end_run(signal.SIGPIPE):
                raise SystemExit(STATUS) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Prefixed(_Stream):
    def __init__(self, stream: Any, prefix: str) -> None:
        super().__init__(stream)
        self._prefix, self._at_start = prefix, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            super().write((self._prefix if self._at_start else "") + line)
            self._at_start = line.endswith("\n")
        return len(text)

    def isatty(self) -> bool:
        """No: others write between the lines."""
        return False


@contextlib.contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Begin each line of the output with a text, while the context is entered."""
    with (
        contextlib.redirect_stdout(_Prefixed(sys.stdout, prefix)),
        contextlib.redirect_stderr(_Prefixed(sys.stderr, prefix)),
    ):
        yield


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """End the program where nobody reads its output any more, while the context is entered.

    Raises:
        SystemExit: with status 141, at a write to standard output or standard error that is closed.
    """
    with (
        contextlib.redirect_stdout(_Stream(sys.stdout)),
        contextlib.redirect_stderr(_Stream(sys.stderr)),
    ):
        try:
            yield
        finally:
            no_longer_waiting()
            sys.stdout.flush()
