"""The two ways a run can end badly, each with a message for the person who typed the command."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TextIO

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # lines and tabs may stay


class ConfigError(ValueError):
    """What was asked for is a mistake. The message has a line for each problem, and says what is
    allowed. It is a ValueError; the command line exits with status 2.

    Attributes:
        problems: the lines.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def raise_all(problems: Iterable[str]) -> None:
    """Raise ConfigError with these lines, if there are any."""
    if lines := list(problems):
        raise ConfigError(lines)


class RunError(Exception):
    """Work began and could not be finished. The message is one line; the command line exits with
    status 1."""


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that torch adds; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def extra(name: str) -> str:
    """How to install an extra of nmrun, which is in no index of packages yet."""
    return f"pip install '.[{name}]' in nmrun's checkout"


@contextlib.contextmanager
def needs(what: str, its_extra: str) -> Iterator[None]:
    """Say of ``what`` which extra it takes, where a package cannot be imported while entered."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs {error.name or error}: {extra(its_extra)}") from None


@contextlib.contextmanager
def refused(prefix: str, *kinds: type[Exception]) -> Iterator[None]:
    """Make errors of these kinds ConfigErrors while entered, whose lines begin with ``prefix``."""
    try:
        yield
    except kinds as error:
        lines = error.problems if isinstance(error, ConfigError) else [first_line(error)]
        raise ConfigError([prefix + line for line in lines]) from None


def world() -> int:
    """The number of processes that ``torchrun`` has started for one run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """The number of this process among them, from 0."""
    return int(os.environ.get("RANK") or 0) if world() > 1 else 0


def leads() -> bool:
    """Whether this process speaks."""
    return rank() == 0


def refuse(problems: Iterable[str], status: int = 2) -> int:
    """Say what is wrong, a line for each problem; returns the exit status."""
    tell(problems)
    return status


def neutral(text: str) -> str:
    """A text with spaces for what is no character: control codes, of which a terminal may begin a
    command, and halves of surrogate pairs, which cannot be written."""
    return CONTROL.sub(" ", text)


def tell(lines: Iterable[str]) -> None:
    """Print lines beside the results, for the person who typed the command."""
    for line in lines if leads() else []:
        print(folded(f"nmrun: {neutral(line)}", sys.stderr), file=sys.stderr)


def folded(text: str, stream: TextIO) -> str:
    """Break lines at words where a terminal ends, and indent what follows; elsewhere a line stays
    one."""
    if not stream.isatty():
        return text
    width, lines = shutil.get_terminal_size().columns, list[str]()
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(
            *(line, max(width, len(indent) + 1)),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)
