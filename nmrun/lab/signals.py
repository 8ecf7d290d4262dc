"""Signals that end a run: SIGINT, SIGTERM, SIGHUP when a terminal closes, SIGXCPU of ``ulimit -t``,
and SIGUSR1, which Slurm sends before the time is up (``--signal=USR1@60``). A signal that the
parent ignores, as under ``nohup`` or ``&`` in a script, stays ignored.

Schedulers, ``timeout`` and shells send them to all processes of a job. A step is finished and saved
first; where nothing is to be saved, a signal acts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1)
LAUNCHERS = signal.SIGUSR2  # submitit's signal, without effect where no launcher handles it
# Seconds within which a second SIGTERM is the first one's echo: ``timeout`` and ``torchrun`` send
# it to the group and to the process.
ECHO = 2.0


def heeded() -> list[signal.Signals]:
    """Those of :data:`ENDING` that the parent has not ignored."""
    return [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]


@functools.cache
def ends_with(parent: int) -> bool:
    """On Linux, let this process get SIGTERM when ``parent`` ends, if that has started it. Returns
    whether it has; later calls return the first answer."""
    if os.getppid() != parent:
        return False
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
    return True


class Signals:
    """While entered, the first signal is noted in ``caught``; a second one ends the process.

    ``then`` says what the first one does besides. ``wait``: nothing. ``act``: it raises
    KeyboardInterrupt. ``interrupt``: the same, and whoever catches that calls :meth:`passed_on`.
    A handler that was installed before, such as submitit's to requeue the job, is called in the
    place of the KeyboardInterrupt. If it returns, the run goes on.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self.then: Literal["act", "interrupt", "wait"] = "act"
        self._former: dict[int, Any] = {}
        self._since = 0.0
        self._process = 0

    def __enter__(self) -> Signals:
        self._process = os.getpid()
        _at_work.append(self)
        numbers = list(heeded())
        if _foreign(signal.getsignal(LAUNCHERS)):
            numbers.append(LAUNCHERS)
        # not in the main thread: whoever runs us there handles signals
        with contextlib.suppress(ValueError):
            for number in numbers:
                self._former[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _at_work:
            _at_work.remove(self)
        for number, former in self._former.items():
            signal.signal(number, former)

    @contextlib.contextmanager
    def set(self, then: Literal["act", "interrupt", "wait"]) -> Iterator[None]:
        """While entered, a signal has this effect, also one that was caught before."""
        before, self.then = self.then, then
        try:
            if self.caught is not None and self._raises():
                raise KeyboardInterrupt
            yield
        finally:
            self.then = before

    def passed_on(self) -> bool:
        """Whether a launcher's handler has taken the signal that was caught, and returned."""
        former = self._former.get(self.caught or 0)
        if former is None or not _foreign(former):
            return False
        former(self.caught, None)
        self.caught = None
        return True

    def _raises(self) -> bool:
        return self.then == "interrupt" or (self.then == "act" and not self.passed_on())

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process ends by itself
            self.__exit__()
            os.kill(os.getpid(), number)
        elif self.caught is None:
            self.caught, self._since = number, time.monotonic()
            if self._raises():
                raise KeyboardInterrupt
        elif number == signal.SIGXCPU:  # it comes every second once the limit is reached
            return
        elif number == signal.SIGINT or time.monotonic() - self._since > ECHO:
            self.__exit__()
            os.kill(os.getpid(), number)


_at_work: list[Signals] = []  # the contexts that are entered in this process


def end_run(number: int) -> bool:
    """End this process's run as a first signal would; False where there is none.

    For SIGPIPE, whose handler stays Python's: a broken connection of a logger would end a run.
    """
    for signals in _at_work[-1:]:
        if signals.caught is None:
            signals._catch(number, None)
    return bool(_at_work)


def is_ending() -> bool:
    """Whether this process's run has caught a signal."""
    return any(signals.caught is not None for signals in _at_work)


def of_interrupt(error: BaseException | None) -> bool:
    """Whether an error is a KeyboardInterrupt or was caused by one: interrupted clean-up in Hydra
    and OmegaConf raises other errors."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(each, KeyboardInterrupt) for each in chain)


def _foreign(handler: Any) -> bool:
    return callable(handler) and handler is not signal.default_int_handler


@contextlib.contextmanager
def blocked_while_forking() -> Iterator[None]:
    """A context in which to start processes that call :func:`left_to_parent`. torch's own handler for
    SIGTERM ends them whoever sent it, and any of their threads may take it, also one that a library
    starts in each child: all are born with the signal blocked."""
    if not hasattr(signal, "sigwaitinfo"):  # on macOS
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def left_to_parent() -> None:
    """Ignore signals in this process, which reads data for the training and is ended by it. After a
    signal to the whole group a step is finished first, and needs its data."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        threading.Thread(target=_end_by_parent, args=(os.getppid(),), daemon=True).start()


def _end_by_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
