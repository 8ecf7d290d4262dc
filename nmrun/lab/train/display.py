"""How far a run is, as a few lines that are drawn anew: a bar, times and figures, and a bar of the
evaluation that is going on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SHORTEST = 10  # characters of a bar
Fact = tuple[str, str]  # what it is, and the figure: ("train loss", "0.4132"), ("", "54 steps/s")


@dataclass(frozen=True)
class Status:
    """How far a run is.

    Attributes:
        step, total: of optimizer steps.
        head: which epoch and phase, ``("epoch 3/12", "sparse phase")``.
        facts: the figures, the most important ones first.
        elapsed: seconds of this sitting.
        left: seconds to the end of the training; None before that can be guessed.
    """

    step: int
    total: int
    head: Sequence[str]
    facts: Sequence[Fact]
    elapsed: float
    left: float | None


@dataclass(frozen=True)
class Evaluated:
    """How far an evaluation is: ``what`` it is called, the batch that begins, from 0, of ``total``."""

    what: str
    batch: int
    total: int


class Display:
    """The lines for :class:`rich.live.Live`: ``status`` and ``evaluated`` are drawn as they are now."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.evaluated: Evaluated | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        width, now = options.max_width - 1, self.status
        times = _clock(now.elapsed)
        times += "" if now.left is None else f" < {_clock(now.left)}"
        share = f"{now.step / max(now.total, 1):4.0%}"
        steps = f"{now.step}/{now.total}"
        head = [*now.head]
        ends = [[share, steps, times], [share, times], [share]]
        wide = [(head, end) for end in ends] + [(head[:1], ends[-1])]
        fits = (pair for pair in wide if _width(pair[0]) + _width(pair[1]) + SHORTEST + 3 <= width)
        left, right = next(fits, ([], ends[-1]))
        yield _bar(left, right, now.step, now.total, width)
        yield from _lines(now.facts, width)
        if self.evaluated is not None:
            what, batch, total = self.evaluated.what, self.evaluated.batch, self.evaluated.total
            yield _bar([what], [f"{batch}/{total}"], batch, total, width)


def _width(parts: Sequence[str]) -> int:
    return sum(map(len, parts)) + 2 * max(len(parts) - 1, 0)


def _bar(left: Sequence[str], right: Sequence[str], done: int, total: int, width: int) -> Table:
    """A bar as wide as there is place between two texts."""
    size = max(SHORTEST, width - _width(left) - _width(right) - 3)
    line = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(3):
        line.add_column(no_wrap=True)
    bar = ProgressBar(total=max(total, 1), completed=done, width=size)
    line.add_row(Text(" " + "  ".join(left), "bold cyan"), bar, Text("  ".join(right)))
    return line


def _lines(facts: Sequence[Fact], width: int) -> Iterator[Text]:
    """The figures in as many lines as they take; none is cut."""
    line = Text()
    for label, value in facts:
        part = Text.assemble((f"{label} " if label else "", "dim"), (value, "bold"))
        if line and len(line) + 2 + len(part) > width:
            yield line
            line = Text()
        line.append("  " if line else " ").append_text(part)
    if line:
        yield line


def _clock(seconds: float) -> str:
    """``0:12``, ``12:34`` or ``1:02:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def plain(head: Sequence[str], facts: Sequence[Fact]) -> str:
    """The same as one line of plain text."""
    return "  ".join([*head, *(f"{label} {value}".strip() for label, value in facts)])
