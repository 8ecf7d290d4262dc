"""What a run shows: a live progress line on a terminal, plain lines elsewhere; ``run.log`` keeps every line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Lines go to the screen and to ``log``; the progress line only to a terminal."""

    def __init__(self, log: Path | None) -> None:
        self._screen = RichConsole(highlight=False, soft_wrap=True)
        self._log = log.open("a") if log is not None else None
        self._progress: Progress | None = None
        self._task: Any = None

    def say(self, text: str) -> None:
        """One or more lines."""
        self._screen.print(text, markup=False)
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()

    def note(self, text: str) -> None:
        """Into ``run.log`` alone: tracebacks."""
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()

    def progress(self, done: int, total: int, text: str) -> None:
        """Move the live line, on a terminal."""
        if not self._screen.is_terminal:
            return
        if self._progress is None:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._screen, transient=True)
            self._task = self._progress.add_task(text, total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done, description=text)

    def stop_progress(self) -> None:
        """Take the live line away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def close(self) -> None:
        self.stop_progress()
        if self._log is not None:
            self._log.close()
