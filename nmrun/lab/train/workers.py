"""The processes of a sweep whose jobs run side by side, and what a signal does to them.

A launcher such as joblib's takes a worker that ends for a failure, and kills all the others at once.
So a signal to the sweep's process goes on to the jobs that run, each saves its run, and whoever is
done first waits for the others before the launcher learns of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from nmrun.errors import tell
from nmrun.lab.signals import ECHO, ENDING, ends_with
from nmrun.lab.words import sweep

SWEEPER = "NMRUN_SWEEPER"  # tells job processes which process launched the sweep
LOOK = 0.1  # seconds between two looks at the others


# --- in the sweep's process -----------------------------------------------------------------------


class Sweeper:
    """While entered, the first signal is ``caught`` and reaches the jobs that run; with a second one
    the launcher ends them at once.

    Args:
        folder: of the sweep's record.
        waits: whether the jobs run in processes that this one has started. Else it leaves signals
            to the launcher.
    """

    def __init__(self, folder: Path, waits: bool) -> None:
        self.folder, self.waits = folder, waits
        self.caught: int | None = None
        self._since = 0.0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Sweeper:
        for number in ENDING if self.waits else ():
            self._former[number] = signal.signal(number, self.catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def catch(self, number: int, frame: FrameType | None = None) -> None:
        """End the sweep as this signal does."""
        if self.caught is None:
            self.caught, self._since = number, time.monotonic()
            sweep.note_signal(self.folder, number)
            # one who has the signal already, since it went to the whole group, takes it for its echo
            for process in sweep.read(self.folder).at_work:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGTERM)
        elif number == signal.SIGINT or time.monotonic() - self._since > ECHO:
            self.__exit__()
            raise KeyboardInterrupt


def note_killed(folder: Path) -> None:
    """Note and say that the jobs which ran have ended with their processes."""
    tell(
        ["a worker was killed, as the system does where memory runs out; the others ended with it"]
    )
    for number, line in sweep.read(folder).running.items():
        ended = {"status": "killed", "folder": line["folder"]}
        sweep.add(folder, ended, line["overrides"], time.time() - line["begun"], number)


# --- in a worker ----------------------------------------------------------------------------------


def launched_this() -> bool:
    """Whether the sweep's process has started this one."""
    return ends_with(int(os.environ.get(SWEEPER, 0)))


def end_with_sweep() -> None:
    """End a worker whose sweep's process has ended: it takes no other job, nor waits for one."""
    if launched_this() and os.getppid() != int(os.environ[SWEEPER]):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def ends_by_signal() -> Iterator[None]:
    """While entered, a signal raises KeyboardInterrupt in a worker, but in a run, which handles it.
    Afterwards none does anything, since an idle worker has nothing to save.
    """
    if not launched_this():
        yield
        return
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ENDING:
            signal.signal(number, _idle)


def _idle(number: int, frame: FrameType | None) -> None:
    end_with_sweep()


def wait_for_others(folder: Path) -> None:
    """Wait until no other process has a job of the sweep that is recorded in a folder."""
    while launched_this() and any(map(_alive, sweep.read(folder).at_work - {os.getpid()})):
        end_with_sweep()
        time.sleep(LOOK)


def _alive(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, 0)
        return True
    return False
