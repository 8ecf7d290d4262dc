"""Where the numbers go: ``metrics.jsonl`` always, and the loggers of ``track``, which must never stop
or delay a run: they work in a thread of their own, in the order of what they are given.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nmrun import atomic
from nmrun.lab.runs import jsonl
from nmrun.lab.train.loggers import LOGGERS, Logger, TrackedRun


class Tracker:
    """One run's metrics, in ``metrics.jsonl`` and in W&B.

    Rows are dictionaries with ``step`` and ``epoch``; a resumed run goes on where its checkpoint
    was.

    Args:
        group: the sweep that it belongs to; None for none.
        step: where training begins, 0 unless resumed. Rows of later steps are dropped, since they
            will come again.
        mark: that of the rows that there should be; None where it is not known.

    Attributes:
        events: which of the run's rows are lost.
        mark: that of the rows that there are.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        run_id: str,
        group: str | None,
        step: int,
        say: Callable[[str], None],
        mark: list[int] | None = None,
    ) -> None:
        path = folder / "metrics.jsonl"
        rows, damaged = jsonl.read(path) if step else ([], [])
        history = [row for row in rows if _step(row) <= step]
        lines = [f"{json.dumps(row)}\n" for row in history]
        self.mark = [0, 0]
        for line in lines:
            self._count(line)
        self.events = _lost(self.mark, mark, damaged)
        atomic.write(path, "".join(lines))
        self._path, self._file = path, path.open("a")
        self._say = say
        self._loggers: dict[str, Logger] = {}  # by name; the thread's own
        self._to_say: list[str] = []  # what the thread leaves to the next log() or finish()
        self._thread: ThreadPoolExecutor | None = None
        run = TrackedRun(folder, config, run_id, group, history, self._to_say.append)
        track = config["track"]
        names = [name for name in (track["name"], *track["also"]) if name in LOGGERS]
        if names:
            # imports and beginnings take a second, for which training need not wait
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loggers")
        for name in dict.fromkeys(names):
            self._leave(name, functools.partial(self._begin, name, run))

    def log(self, row: dict[str, Any]) -> None:
        """Write one row, with the ``time`` in seconds since 1970. Numbers that are not finite become
        null, which every JSON reader knows.
        """
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        row["time"] = round(time.time(), 3)
        line = json.dumps(row) + "\n"
        with atomic.room_told(self._path):
            self._file.write(line)
            self._file.flush()
        self._count(line)
        self._tell(lambda logger: logger.log(row))

    def _count(self, line: str) -> None:
        """``mark`` is the number of rows, and a checksum of them all."""
        self.mark = [self.mark[0] + 1, zlib.crc32(line.encode(), self.mark[1])]

    def sync(self) -> None:
        """Put the rows on disk; called before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Close all.

        Args:
            exit_code: 0 for a finished run.
        """
        with contextlib.suppress(OSError):  # what a full disk did not take has been said already
            self._file.close()
        self._tell(lambda logger: logger.finish(summary, exit_code))
        if self._thread is not None:
            self._thread.shutdown()
        self._speak()

    # --- loggers ------------------------------------------------------------------------------

    def _tell(self, action: Callable[[Logger], Any]) -> None:
        """Leave to the thread what is to be done with each logger that there is by then."""
        for name in LOGGERS:
            self._leave(name, functools.partial(self._do, name, action))
        self._speak()

    def _do(self, name: str, action: Callable[[Logger], Any]) -> None:
        if name in self._loggers:
            action(self._loggers[name])

    def _leave(self, name: str, action: Callable[[], Any]) -> None:
        if self._thread is not None:
            self._thread.submit(self._tried, name, action)

    def _begin(self, name: str, run: TrackedRun) -> None:
        logger = LOGGERS[name][1](run)
        if logger is not None:
            self._loggers[name] = logger

    def _speak(self) -> None:
        while self._to_say:
            self._say(self._to_say.pop(0))

    def _tried(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (
            Exception
        ) as error:  # a missing, broken or unreachable logger costs one line, not the run
            self._loggers.pop(name, None)
            reason = (str(error).strip().splitlines() or [""])[0]
            self._to_say.append(
                f"{LOGGERS[name][0]} is off for this run ({type(error).__name__}: {reason}); metrics.jsonl has everything"
            )


def _step(row: dict[str, Any]) -> float:
    step = row.get("step")
    return step if type(step) is int else math.inf


def _lost(found: list[int], mark: list[int] | None, damaged: list[int]) -> list[str]:
    """What is to be said of rows that a checkpoint counts on and that are not there."""
    if found == mark or not (mark or damaged):
        return []
    where = f" (damaged: line {', '.join(map(str, damaged))})" if damaged else ""
    if mark is None:  # an earlier version's checkpoint
        return [f"metrics.jsonl: rows may be lost{where}"]
    if found[0] < mark[0]:
        return [f"metrics.jsonl: {mark[0] - found[0]} of {mark[0]} rows are lost{where}"]
    return [f"metrics.jsonl: not the {mark[0]} rows that were logged; it was changed{where}"]
