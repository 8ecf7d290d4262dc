"""A folder that one process at a time works in. The lock goes with the process, however that ends, and leaves no file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Hold the lock while entered; False if another process has it. Where there are no such locks, everybody has it."""
    if fcntl is None:
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield any(_locked(handle, fcntl.LOCK_EX, wait) for wait in (0, 0.02, 0.05, 0.1, 0.2))  # held() may be looking just now
    finally:
        os.close(handle)


def held(folder: Path) -> bool:
    """Whether a live process holds the lock of the folder; asking disturbs neither it nor one that is about to take the lock."""
    if fcntl is None:
        return False
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _locked(handle, fcntl.LOCK_SH)  # shared, so that two who ask do not see each other
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)


def _locked(handle: int, kind: int, wait: float = 0) -> bool:
    time.sleep(wait)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
