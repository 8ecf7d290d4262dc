"""What a run says: on the screen, with a live display where that is a terminal, and as plain text in
``run.log``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmrun.errors import folded
from nmrun.lab.tasks.base import evaluating

REFRESH = 0.1  # seconds between two drawings of the display
Fact = tuple[str, str]  # what it is, and the figure: ("train loss", "0.4132"), ("", "54 steps/s")


@dataclass(frozen=True)
class Status:
    """How far a run is.

    Attributes:
        step, total: of optimizer steps.
        epoch: ``3/12``.
        phase: ``dense`` or ``sparse``; empty in a run without sparse weights.
        facts: the figures, the most important ones first.
        elapsed: seconds of this sitting.
        left: seconds to the end of the training; None before that can be guessed.
    """

    step: int
    total: int
    epoch: str
    phase: str
    facts: Sequence[Fact]
    elapsed: float
    left: float | None


class Console:
    """Lines for the reader. ``brief`` keeps details off the screen (in a sweep); ``run.log`` has
    them always.

    ``log`` is opened at the first line, so a run that is refused leaves no file; None writes none.
    Colours are for terminals, unless NO_COLOR is set.
    """

    def __init__(self, log: Path | None, brief: bool = False) -> None:
        self.log, self.brief = log, brief
        self._live: Any = None
        self._shown: Status | None = None
        self._drawn = 0.0
        self.on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def say(self, text: str, error: bool = False, style: str = "") -> None:
        """Show a line on the screen and write it to the log.

        Args:
            text: the line.
            error: show it on standard error.
            style: its colour on a terminal, such as ``bold green``.
        """
        self.clear()
        stream = sys.stderr if error else sys.stdout
        # a full disk behind ``nmrun ... > file`` must not end a run; the log has the line
        with contextlib.suppress(OSError):
            if style and self.on_terminal:
                _rich(error).print(folded(text, stream), style=style, soft_wrap=True)
            else:
                print(folded(text, stream), file=stream, flush=True)
        self.note(text)

    def detail(self, text: str, style: str = "") -> None:
        """A line for the log, and for the screen unless brief."""
        self.note(text) if self.brief else self.say(text, style=style)

    def note(self, text: str) -> None:
        """A line for the log only."""
        if self.log is None:
            return
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(text.rstrip("\n") + "\n")
        except OSError as error:  # a full disk must not keep a run from ending in order
            print(
                f"nmrun: {self.log} cannot be written: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )
            self.log = None

    def progress(self, now: Callable[[], Status]) -> None:
        """Draw how far the training is, at most every ``REFRESH`` seconds; does nothing where there
        is no terminal.
        """
        if self._due():
            self._shown = now()
            self._draw()

    @contextlib.contextmanager
    def evaluation(self, what: str) -> Iterator[None]:
        """Draw how far an evaluation is, ``what`` it is called beside it, while entered."""

        def tell(batch: int, total: int) -> None:
            if self._shown is not None and self._due():
                self._draw((what, batch, total))

        before = evaluating.set(tell)
        try:
            yield
        finally:
            evaluating.reset(before)

    def _due(self) -> bool:
        return self.on_terminal and time.monotonic() - self._drawn >= REFRESH

    def _draw(self, evaluated: tuple[str, int, int] | None = None) -> None:
        assert self._shown is not None
        self._drawn = time.monotonic()
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                console=_rich(),
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        width = self._live.console.width
        self._live.update(_display(self._shown, width, evaluated), refresh=True)

    def clear(self) -> None:
        """Take the display away; the next :meth:`progress` brings it back."""
        if self._live is not None:
            self._live.stop()
            self._live, self._drawn = None, 0.0


def _rich(error: bool = False) -> Any:
    from rich.console import Console as Rich

    return Rich(stderr=error, highlight=False, markup=False, emoji=False)


def _display(now: Status, width: int, evaluated: tuple[str, int, int] | None = None) -> Any:
    """The lines that are drawn anew: a bar, the figures, and the bar of the evaluation that is going
    on: what it is called, its batch, of how many.
    """
    from rich.columns import Columns
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Column, Table
    from rich.text import Text

    def bar(left: str, done: int, total: int, right: str) -> Table:
        drawn = ProgressBar(max(total, 1), done)
        if width - len(left) - len(right) < 14:  # no place for a bar between them
            line = Table.grid(Column(ratio=1), expand=True)
            line.add_row(Text.assemble((left, "bold cyan"), f"  {right}"))
            line.add_row(drawn)
        else:
            line = Table.grid("", Column(ratio=1), "", padding=(0, 1), expand=True)
            line.add_row(Text(left, "bold cyan"), drawn, right)
        return line

    left = "" if now.left is None else f" < {_clock(now.left)}"
    right = (
        f"{now.step / max(now.total, 1):4.0%}  {now.step}/{now.total}  {_clock(now.elapsed)}{left}"
    )
    figures = [
        Text.assemble((f"{what} " if what else "", "dim"), (figure, "bold"))
        for what, figure in now.facts
    ]
    lines: list[Any] = [bar(f"epoch {now.epoch}  {now.phase}", now.step, now.total, right)]
    lines.append(Columns(figures, padding=(0, 2)))
    if evaluated is not None:
        what, batch, total = evaluated
        lines.append(bar(what, batch, total, f"{batch}/{total}"))
    return Padding(Group(*lines), (0, 1))


def _clock(seconds: float) -> str:
    """``0:12``, ``12:34`` or ``1:02:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
