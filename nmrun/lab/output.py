"""What the command writes to its terminal: tables, numbers and times in words, a line while one waits,
and a quiet end.

Where the reader of standard output closes it (``nmrun ... | head``), the program ends quietly, a run
once its checkpoint is saved. Python's default for the signal SIGPIPE stays, since otherwise a broken
connection to W&B would end a run.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nmrun.lab.signals import end_run

STATUS = 128 + signal.SIGPIPE  # which shells give a program that the signal ended
_waiting: list[Any] = []  # the stream of the line of waiting(), until something takes its place


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, the cells of a column below each other."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return [line.rstrip() for line in lines]


def quantity(count: int | str, noun: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


def span(seconds: float) -> str:
    """A time as people say it: ``45 s``, ``12 min``, ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def is_terminal(stream: Any) -> bool:
    """Whether lines of a stream can be drawn anew."""
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def waiting(text: str) -> None:
    """Show on a terminal what takes a moment, until the next line takes its place."""
    stream = sys.stdout
    if isinstance(stream, _Stream) and is_terminal(stream):
        stream.write(f"{text} ...")
        stream.flush()
        _waiting.append(stream)


def no_longer_waiting() -> None:
    while _waiting:
        _waiting.pop().write("\r\x1b[K")


def discard(stream: Any) -> None:
    """Lose what a program's output holds back, and all that follows."""
    if isinstance(stream, _Stream):
        stream.discard()


class _Stream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        no_longer_waiting()
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
            self.discard()
            if not end_run(signal.SIGPIPE):
                raise SystemExit(STATUS) from None

    def discard(self) -> None:
        """Lose what the buffer holds. Python flushes it at exit, which would raise again."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let libraries print, log and warn of nothing while entered."""
    level, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with (
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        logging.disable(level)


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
    """End the program, with status 141, where nobody reads its output any more, while entered.
    Characters that the output's encoding lacks become question marks."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")
    stream = _Stream(sys.stdout)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(_Stream(sys.stderr)):
        try:
            yield
        finally:
            no_longer_waiting()
            try:
                stream.flush()
            except OSError:  # a full disk, which the command has told
                stream.discard()
