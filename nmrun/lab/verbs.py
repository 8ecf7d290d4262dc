"""What every verb of the command line shares: the option parser, and a quiet end of the output.

A verb raises ConfigError for a mistake in the command and RunError for work that failed. The
command line prints either as one line, ``nmrun: ...``, and exits with status 2 or 1. Where the
reader of standard output closes it (``nmrun ... | head``), the program ends quietly, a run once its
checkpoint is saved. Python's default for the signal SIGPIPE stays, since otherwise a broken connection to W&B would end a run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nmrun.errors import ConfigError
from nmrun.lab.signals import end_run
from nmrun.ranges import Check
from nmrun.registry import did_you_mean


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ConfigError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(
            r"^argument (.*): ignored explicit argument .*", r"\1 takes no value", message
        )
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
    except OSError as error:
        parts = (str(part) for part in (error.filename, error.strerror) if part)
        raise ConfigError(": ".join(parts) or str(error)) from None


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, the cells of a column below each other."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return [line.rstrip() for line in lines]


def quantity(count: int, noun: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def is_terminal(stream: Any) -> bool:
    """Whether lines of a stream can be drawn anew."""
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def agreed(verb: str, question: str) -> bool:
    """Ask, and return whether the answer is yes; ConfigError where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{verb}: {question} Nobody to ask here; --yes is the answer")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


STATUS = 128 + signal.SIGPIPE  # which shells give a program that the signal ended


QUIET = 30.0  # seconds
_waiting: list[Any] = []  # the stream of the line of waiting(), until something takes its place


def waiting(text: str) -> None:
    """Show on a terminal what takes a moment, until the next line takes its place; elsewhere as a
    line, after ``QUIET`` seconds without one."""
    stream = sys.stdout
    if not isinstance(stream, _Stream):
        return
    if is_terminal(stream):
        stream.write(f"{text} ...")
        stream.flush()
        _waiting.append(stream)
    elif time.monotonic() - stream.written >= QUIET:
        print(f"{text} ...", flush=True)


def no_longer_waiting() -> None:
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


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """Write standard output and error to a file while entered, also what is written past Python. If
    it cannot be opened, they are lost."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        log = path.open("a", encoding="utf-8", errors="replace", buffering=1)
    except OSError:
        log = open(os.devnull, "w")  # noqa: SIM115  # closed below
    before = {number: os.dup(number) for number in (1, 2)}
    try:
        with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            for number in before:
                os.dup2(log.fileno(), number)
            yield
    finally:
        for number, duplicate in before.items():
            os.dup2(duplicate, number)
            os.close(duplicate)


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """End the program, with status 141, where nobody reads its output any more, while entered."""
    with (
        contextlib.redirect_stdout(_Stream(sys.stdout)),
        contextlib.redirect_stderr(_Stream(sys.stderr)),
    ):
        try:
            yield
        finally:
            no_longer_waiting()
            sys.stdout.flush()


# --- consent to the code that a run folder names: what stands as ``_target_`` in its config is imported
# and called, and a folder may come from anybody

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
    if not consent and (targets := code_of(config, groups)):
        raise ConfigError(
            f"{folder}: the run imports {', '.join(targets)}, which may do anything; --yes says that "
            "you trust it"
        )
