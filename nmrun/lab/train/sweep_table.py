"""What a sweep shows whose jobs run side by side: a line for each that has ended and, on a terminal,
one table of those that run.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nmrun.errors import folded
from nmrun.lab.runs import position
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.words import metric, sweep

GAP = 2  # columns
PAUSE = 0.5  # seconds between two looks
STYLES = {"finished": "green", "failed": "bold red", "refused": "bold red", "killed": "bold red"}


class SweepTable:
    """While entered, a thread reads the record of a sweep and the files of its runs.

    Args:
        folder: of the record.
        left: called once where nobody reads the output any more.

    Attributes:
        is_drawn: whether the table is on the terminal.
    """

    def __init__(self, folder: Path, left: Callable[[], None]) -> None:
        self.folder, self.left = folder, left
        self.is_drawn = False
        self._told = 0
        self._trainers: dict[str, dict[str, Any]] = {}  # of runs by their folder
        self._live: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> SweepTable:
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.live import Live

            console = Console(highlight=False, markup=False, emoji=False)
            self._live = Live(
                *(None,),
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _watch(self) -> None:
        try:
            self._look()
            while not self._over.wait(PAUSE):
                self._look()
            self._look()
        except SystemExit:
            self.left()

    def _look(self) -> None:
        record = sweep.read(self.folder)
        for line in record.done[self._told :]:
            if line["status"] == "planned":  # a list of all follows at the end
                continue
            self._tell(ended(self.folder, record, line), STYLES.get(line["status"], ""))
        self._told = len(record.done)
        if self._live is not None:
            rows = [self._row(record, line) for _, line in sorted(record.running.items())]
            width, height = shutil.get_terminal_size()
            self._live.update(drawn(rows, foot(record, len(rows)), width, height), refresh=True)
            self.is_drawn = True

    def _tell(self, text: str, style: str) -> None:
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(folded(text, sys.stdout), style=style, soft_wrap=True)

    def _row(self, record: sweep.Record, line: dict[str, Any]) -> tuple[str, ...]:
        """The cells of a job: which it is, and as far as is known its phase, epoch or step, metric
        and time left.
        """
        place, name = str(line.get("folder") or ""), sweep.name(record, line)
        trainer = self._trainers.get(place) or RunFolder(place).config.get("trainer", {})
        self._trainers[place] = trainer
        now = position.of(Path(place), trainer) if place else None
        if now is None:
            return (name, "", "begins", "", "")
        left = "" if now.left is None else sweep.span(now.left)
        return (name, now.phase, now.epoch or now.steps, now.validation, left)


def ended(folder: Path, record: sweep.Record, line: dict[str, Any]) -> str:
    """The line of a job that has ended.

    Args:
        folder: of the record.
        record: of the sweep.
        line: of the job's end.
    """
    status = line["status"]
    final = (line.get("metrics") or {}).get("final", {})
    if status in ("finished", "skipped") and line.get("metric"):
        said = metric.by_split(final, line["metric"])
        status = "finished already" if status == "skipped" else status
        took = f"; {sweep.span(line['seconds'])}" if line["status"] == "finished" else ""
        return f"{sweep.name(record, line)}: {status}, {line['metric']} {said}{took}"
    parts = [f"{status}: {line['error']}" if line.get("error") else status]
    if status in ("failed", "refused", "killed") and line.get("job"):
        parts.append(str(sweep.log_of(folder, line["job"])))
    return f"{sweep.name(record, line)}: {'; '.join(parts)}"


def foot(record: sweep.Record, running: int) -> str:
    """The line below the table: ``2 of 6 jobs done, 1 failed, 2 running; 25 s so far, 50 s left``."""
    counts = record.counts()
    words = [f"{len(record.done)} of {record.jobs or '?'} jobs done"]
    words += [f"{counts[key]} {key}" for key in ("failed", "refused", "killed") if key in counts]
    words.append(f"{running} running")
    passed, left = record.elapsed(running=True), record.left()
    times = [] if passed is None else [f"{sweep.span(passed)} so far"]
    times += [] if left is None else [f"{sweep.span(left)} left"]
    if record.signal is not None:
        name = signal.Signals(record.signal).name
        return f"{', '.join(words)}; {name}: each saves its run, a second one ends them at once"
    return "; ".join([", ".join(words), *([", ".join(times)] if times else [])])


def drawn(rows: list[tuple[str, ...]], foot: str, width: int, height: int) -> Any:
    """The table, as wide as the terminal at most: names of jobs are cut where it is narrow.

    Args:
        rows: as of the jobs that run.
        foot: the line below it.
        width, height: of the terminal.
    """
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    heads = ("job", "phase", "epoch", "metric", "left")
    shown = rows[: max(height - 4, 1)]
    lines = [heads, *shown]
    keep = [at for at in range(len(heads)) if at == 0 or any(row[at] for row in shown)]
    wide = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    wide[0] = max(min(wide[0], width - sum(wide[at] + GAP for at in keep[1:])), 8)
    table = Table.grid(
        *(Column(width=wide[at], no_wrap=True) for at in keep), padding=(0, GAP, 0, 0)
    )
    for line in lines:
        style = "dim" if line is heads else ""
        table.add_row(*(Text(line[at], style, overflow="ellipsis", no_wrap=True) for at in keep))
    more = [f"and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    below = [Text(text, "dim", overflow="ellipsis", no_wrap=True) for text in (*more, foot)]
    return Group(*([table] if rows else []), *below)
