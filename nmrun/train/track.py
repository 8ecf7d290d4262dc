"""Where the numbers go: ``metrics.jsonl`` always, and Weights & Biases, which must never stop or
delay a run: it works in a thread of its own, in the order of what it is given.
"""

from __future__ import annotations

import contextlib
import json
import math
import netrc
import os
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from nmrun.files import jsonl
from nmrun.train import checkpoint

INIT_TIMEOUT = 10.0  # seconds that an online W&B may take to answer, once a process
# seconds that it may take to upload the rest at the end; what is left stays on disk for wandb sync
FINISH_TIMEOUT = 60.0
_unreachable = (
    False  # W&B did not answer in this process: do not wait for it again in the next run of a sweep
)


class Tracker:
    """One run's metrics, in ``metrics.jsonl`` and in W&B.

    Rows are dictionaries with ``step`` and ``epoch``; a resumed run goes on where its checkpoint
    was.

    Args:
        folder: the run's folder.
        config: its config as plain data, for W&B.
        run_id: its identity.
        group: the sweep that it belongs to; None for none.
        step: where training begins, 0 unless resumed. Rows of later steps are dropped, since they
            will come again.
        say: prints a line.
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
        self._history = [row for row in rows if _step(row) <= step]
        lines = [f"{json.dumps(row)}\n" for row in self._history]
        self.mark = [0, 0]
        for line in lines:
            self._count(line)
        self.events = _lost(self.mark, mark, damaged)
        checkpoint.write(path, "".join(lines))
        self._file = path.open("a")
        self._say = say
        self._run: Any = None  # W&B's, the thread's own
        self._to_say: list[str] = []  # what the thread leaves to the next log() or finish()
        self._thread: ThreadPoolExecutor | None = None
        if config["track"]["name"] == "wandb":
            # the import and init take a second, for which training need not wait
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="wandb")
            self._thread.submit(self._tried, lambda: self._start(folder, config, run_id, group))

    def log(self, row: dict[str, Any]) -> None:
        """Write one row. Numbers that are not finite become null, which every JSON reader knows."""
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        line = json.dumps(row) + "\n"
        self._file.write(line)
        self._file.flush()
        self._count(line)
        self._wandb(lambda run: run.log(row, step=row["step"]))

    def _count(self, line: str) -> None:
        """``mark`` is the number of rows, and a checksum of them all."""
        self.mark = [self.mark[0] + 1, zlib.crc32(line.encode(), self.mark[1])]

    def sync(self) -> None:
        """Put the rows on disk; called before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Close all.

        Args:
            summary: nested plain data, for W&B.
            exit_code: 0 for a finished run.
        """
        with contextlib.suppress(OSError):  # what a full disk did not take has been said already
            self._file.close()
        self._wandb(lambda run: run.summary.update(summary))
        self._wandb(lambda run: run.finish(exit_code=exit_code))
        if self._thread is not None:
            self._thread.shutdown()
        self._speak()

    # --- Weights & Biases -------------------------------------------------------------------------

    def _wandb(self, action: Callable[[Any], Any]) -> None:
        """Leave to the thread what is to be done with W&B's run, if there is one by then."""
        if self._thread is not None:
            self._thread.submit(self._tried, lambda: self._run is None or action(self._run))
        self._speak()

    def _speak(self) -> None:
        while self._to_say:
            self._say(self._to_say.pop(0))

    def _tried(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except (
            Exception
        ) as error:  # a missing, broken or unreachable wandb costs one line, not the run
            self._run = None
            reason = (str(error).strip().splitlines() or [""])[0]
            self._to_say.append(
                f"W&B is off for this run ({type(error).__name__}: {reason}); metrics.jsonl has everything"
            )

    def _start(self, folder: Path, config: dict[str, Any], run_id: str, group: str | None) -> None:
        global _unreachable
        mode = os.environ.get("WANDB_MODE") or config["track"]["mode"]
        if mode == "disabled":
            return
        online = mode in ("online", "auto") and logged_in()
        if mode == "online" and not online:
            self._to_say.append("W&B: not logged in (wandb login), tracking offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        # Only what is logged here is sent: no console capture, machine statistics, git state or
        # source code.
        wanted: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "init_timeout": INIT_TIMEOUT,
            "finish_timeout": FINISH_TIMEOUT,
        }
        wanted |= dict.fromkeys(
            (
                "disable_code",
                "disable_git",
                "x_disable_stats",
                "x_disable_meta",
                "x_disable_machine_info",
            ),
            True,
        )
        wanted["x_save_requirements"] = False
        known = wandb.Settings.model_fields  # these differ between versions
        settings = wandb.Settings(**{key: value for key, value in wanted.items() if key in known})
        arguments: dict[str, Any] = {
            "project": config["track"]["project"],
            "entity": config["track"]["entity"],
            "group": config["track"]["group"] or group,
            "id": run_id,
            "name": "/".join(folder.parts[-3:]),
            "dir": str(folder),
            "config": config,
            "settings": settings,
            "reinit": "finish_previous",
        }
        if online and not _unreachable:
            try:
                # without resume, a run of the same id is replaced: that is force=true
                self._run = wandb.init(
                    mode="online", resume="allow" if self._history else None, **arguments
                )
                return
            except Exception as error:
                _unreachable = True
                wandb.teardown(exit_code=1)  # its service would hold the run's id
                self._to_say.append(
                    f"W&B cannot be reached ({type(error).__name__}): tracking offline, wandb sync uploads it later"
                )
        # An offline run cannot be taken up again: replace it by one with the whole history.
        for old in (folder / "wandb").glob("*run-*"):
            shutil.rmtree(old, ignore_errors=True)
        self._run = wandb.init(mode="offline", **arguments)
        for row in self._history:
            self._run.log(row, step=row["step"])
        import pandas  # noqa: F401  # else W&B imports it for the summary, when all else is done


def logged_in() -> bool:
    """Whether there is a key, in the environment or in netrc. Asks no network and no person."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


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
