"""A sweep whose jobs run side by side: its processes, their signals, and the lines about its jobs.

A launcher such as joblib's kills all workers as soon as one of them ends. So the sweep's process
passes a signal on to the running jobs, and each saves its run. The first worker that is done waits
for the others before it ends. Ray's workers may be elsewhere: they read of the signal in the record.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from nmrun.errors import tell
from nmrun.lab.compare import notation
from nmrun.lab.output import span
from nmrun.lab.records import sweep
from nmrun.lab.signals import ECHO, ENDING, ends_with, heeded, is_ending

SWEEPER = "NMRUN_SWEEPER"  # tells job processes which process launched the sweep
LOOK = 0.1  # seconds between two looks at the others
PAUSE = 0.5  # seconds between two looks at the record


# --- in the sweep's process -----------------------------------------------------------------------


class Sweeper:
    """While entered, a thread reads the record and prints a line for each job that has ended. The first
    signal is noted in ``caught`` and passed on to the running jobs; so is the end of whoever reads
    the output. After a second one the launcher ends them at once.

    ``waits``: the jobs hear of it. Else the launcher handles signals.
    """

    def __init__(self, folder: Path, waits: bool) -> None:
        self.folder, self.waits = folder, waits
        self.caught: int | None = None
        self._since = 0.0
        self._former: dict[int, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sweeper:
        if self.waits:
            for number in heeded():
                self._former[number] = signal.signal(number, self.catch)
            _start_trackers()
            # workers inherit this, and have no handlers while they start; the thread gets the signal
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._restore()

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        if self.waits:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def catch(self, number: int, frame: FrameType | None = None) -> None:
        if self.caught is None:
            self.caught, self._since = number, time.monotonic()
            sweep.note_signal(self.folder, number)
            # jobs that got the signal themselves, as the process group did, ignore this echo
            for process in sweep.read(self.folder).at_work:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGTERM)
        elif number == signal.SIGINT or time.monotonic() - self._since > ECHO:
            self._restore()
            raise KeyboardInterrupt

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        told, is_signal_told, is_over = 0, False, False
        try:
            while not is_over:
                is_over = self._over.wait(PAUSE)
                record = sweep.read(self.folder)
                for line in record.ends[told:]:
                    print(job_line(self.folder, record, line), flush=True)
                told = len(record.ends)
                if record.signal is not None and not is_signal_told:
                    is_signal_told = True
                    name = signal.Signals(record.signal).name
                    print(
                        f"{name}: each job saves its run, a second one ends them at once",
                        flush=True,
                    )
        except SystemExit:
            self.catch(signal.SIGPIPE)


def job_line(folder: Path, record: sweep.Record, line: dict[str, Any]) -> str:
    status = line["status"]
    final = (line.get("metrics") or {}).get("final", {})
    if status in ("finished", "skipped") and line.get("metric"):
        scores = notation.by_split(final, line["metric"])
        status = "finished already" if status == "skipped" else status
        took = f"; {span(line['seconds'])}" if line["status"] == "finished" else ""
        return f"{sweep.name(record, line)}: {status}, {line['metric']} {scores}{took}"
    parts = [f"{status}: {line['error']}" if line.get("error") else status]
    if status in ("failed", "refused", "killed") and line.get("job"):
        parts.append(str(sweep.log_of(folder, line["job"])))
    return f"{sweep.name(record, line)}: {'; '.join(parts)}"


def _start_trackers() -> None:
    """Start what joblib and Python start before the first worker: that would unblock signals."""
    resource_tracker.ensure_running()
    with contextlib.suppress(ImportError):
        from joblib.externals.loky.backend import resource_tracker as joblib_tracker

        joblib_tracker.ensure_running()


def note_killed(folder: Path) -> None:
    tell(
        ["a worker was killed, as the system does where memory runs out; the others ended with it"]
    )
    for number, line in sweep.read(folder).running.items():
        ended = {"status": "killed", "folder": line["folder"]}
        sweep.add(folder, ended, line["overrides"], time.time() - line["begun"], number)


@contextlib.contextmanager
def signals_for_run() -> Iterator[None]:
    """While entered, a run in the sweep's own process handles signals itself. With ``n_jobs=1``
    joblib has no workers to which :class:`Sweeper` could pass them on."""
    former = {each: handler for each in ENDING if callable(handler := signal.getsignal(each))}
    with _interrupting(former):
        yield


@contextlib.contextmanager
def _interrupting(
    afterwards: Mapping[signal.Signals, Callable[[int, FrameType | None], Any]],
) -> Iterator[None]:
    """While entered, these signals raise KeyboardInterrupt, except in a run, which handles them.
    Afterwards they have the handlers that are given."""
    for number in afterwards:
        signal.signal(number, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see Sweeper
        yield
    finally:
        for number, handler in afterwards.items():
            signal.signal(number, handler)


# --- in a worker ----------------------------------------------------------------------------------


def launched_this() -> bool:
    return ends_with(int(os.environ.get(SWEEPER, 0)))


def end_with_sweep() -> None:
    """End a worker whose sweep's process has ended, so that it neither takes nor awaits another
    job."""
    if launched_this() and os.getppid() != int(os.environ[SWEEPER]):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def ends_by_signal() -> Iterator[None]:
    """While entered, a signal raises KeyboardInterrupt in a worker, except in a run, which handles
    it. Afterwards signals are ignored: an idle worker has nothing to save."""
    if not launched_this():
        yield
        return
    with _interrupting(dict.fromkeys(heeded(), _idle)):
        yield


@contextlib.contextmanager
def ends_by_record(folder: Path) -> Iterator[None]:
    """While entered, a signal in the sweep's record ends the job of this process as SIGTERM would."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(PAUSE):
            if sweep.read(folder).signal is not None and not is_ending():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    former: Any = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL  # None: it is no Python's
    thread = threading.Thread(target=watch, daemon=True)
    with _interrupting({signal.SIGTERM: former}):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _idle(number: int, frame: FrameType | None) -> None:
    end_with_sweep()


def wait_for_others(folder: Path) -> None:
    """Wait until no other process runs a job of the sweep whose record is in ``folder``."""
    while launched_this() and any(map(_alive, sweep.read(folder).at_work - {os.getpid()})):
        end_with_sweep()
        time.sleep(LOOK)


def _alive(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, 0)
        return True
    return False
