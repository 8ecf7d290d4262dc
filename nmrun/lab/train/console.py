"""What a run says: on the screen, with a live display where that is a terminal, and as plain text in
``run.log``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nmrun.lab.tasks.base import evaluating
from nmrun.lab.train.display import Display, Evaluated, Status

REFRESH = 0.1  # seconds between two drawings of the display


class Console:
    """Lines for the reader. ``brief`` keeps details off the screen (in a sweep); ``run.log`` has
    them always.

    ``log`` is opened at the first line, so a run that is refused leaves no file; None writes none.
    Colours are for terminals, unless NO_COLOR is set.
    """

    def __init__(self, log: Path | None, brief: bool = False) -> None:
        self.log, self.brief = log, brief
        self._live: Any = None
        self._display: Display | None = None
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
        # a full disk behind ``nmrun ... > file`` must not end a run; the log has the line
        with contextlib.suppress(OSError):
            if style and self.on_terminal:
                _rich(error).print(text, style=style, soft_wrap=True)
            else:
                print(text, file=sys.stderr if error else sys.stdout, flush=True)
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

    def progress(self, status: Callable[[], Status]) -> None:
        """Draw how far the training is, at most every ``REFRESH`` seconds; does nothing where there
        is no terminal.
        """
        if self._due():
            self._display = self._display or Display(status())
            self._display.status, self._display.evaluated = status(), None
            self._draw()

    @contextlib.contextmanager
    def evaluation(self, what: str) -> Iterator[None]:
        """Draw how far an evaluation is, ``what`` it is called beside it, while entered."""

        def tell(batch: int, total: int) -> None:
            if self._display is not None and self._due():
                self._display.evaluated = Evaluated(what, batch, total)
                self._draw()

        before = evaluating.set(tell)
        try:
            yield
        finally:
            evaluating.reset(before)

    def _due(self) -> bool:
        return self.on_terminal and time.monotonic() - self._drawn >= REFRESH

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                self._display,
                console=_rich(),
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        self._live.refresh()

    def clear(self) -> None:
        """Take the display away; the next :meth:`progress` brings it back."""
        if self._live is not None:
            self._live.stop()
            self._live, self._drawn = None, 0.0


def _rich(error: bool = False) -> Any:
    from rich.console import Console as Rich

    return Rich(stderr=error, highlight=False, markup=False, emoji=False)
