"""What a run says: on the screen, with a live line where that is a terminal, and as plain text in
``run.log``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REFRESH = 0.1  # seconds between two drawings of the live line


class Console:
    """Lines for the reader. ``brief`` keeps details off the screen (in a sweep); ``run.log`` has
    them always.

    ``log`` is opened at the first line, so a run that is refused leaves no file; None writes none.
    """

    def __init__(self, log: Path | None, brief: bool = False) -> None:
        self.log, self.brief = log, brief
        self._live: Any = None
        self._drawn = 0.0
        self.on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def say(self, text: str, error: bool = False) -> None:
        """A line for the screen (standard error with ``error``) and the log."""
        self.clear()
        # a full disk behind ``nmrun ... > file`` must not end a run; the log has the line
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr if error else sys.stdout, flush=True)
        self.note(text)

    def detail(self, text: str) -> None:
        """A line for the log, and for the screen unless brief."""
        self.note(text) if self.brief else self.say(text)

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

    def progress(self, step: int, total: int, status: Callable[[], str]) -> None:
        """Redraw the live line, at most every ``REFRESH`` seconds; does nothing where there is no
        terminal.
        """
        now = time.monotonic()
        if not self.on_terminal or now - self._drawn < REFRESH:
            return
        self._drawn = now
        text = f"{step}/{total}  {status()}"
        if self._live is None:
            self._live = _live_line(step, total, text)
        self._live.update(self._live.task_ids[0], completed=step, status=text)
        self._live.refresh()

    def clear(self) -> None:
        """Take the live line away; the next :meth:`progress` brings it back."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _live_line(step: int, total: int, text: str) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    # it is the text that a narrow terminal cuts
    bar = BarColumn(16, table_column=Column(min_width=16))
    live = Progress(
        bar, TextColumn("{task.fields[status]}", markup=False), transient=True, auto_refresh=False
    )
    live.add_task("", total=total, completed=step, status=text)
    live.start()
    return live
