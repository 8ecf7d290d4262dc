"""What one process at a time has: a folder to work in, a GPU. A lock goes with its process, however
that ends.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Hold the lock while entered; False if another process has it. Where there are no such locks,
    everybody has it.
    """
    if fcntl is None:
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        # held() may be looking just now
        yield any(_locked(handle, fcntl.LOCK_EX, wait) for wait in (0, 0.02, 0.05, 0.1, 0.2))
    finally:
        os.close(handle)


def held(folder: Path) -> bool:
    """Whether a live process holds the lock of the folder; asking disturbs neither it nor one that
    is about to take the lock.
    """
    if fcntl is None:
        return False
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        # shared, so that two who ask do not see each other
        return not _locked(handle, fcntl.LOCK_SH)
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


# GPU: the open lock file, which a sweep's next run in the same process keeps
_held: dict[int, int] = {}


def free_gpu(count: int, wait: float = 1.0) -> int:
    """The number of a GPU that no other process holds by this function, now this process's own.
    Looks again every ``wait`` seconds.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs, so locks go by what it lists.
    """
    if _held:
        return next(iter(_held))
    visible = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    names = visible if len(visible) == count else [str(number) for number in range(count)]
    while True:
        for number, name in enumerate(names):
            place = Path(
                tempfile.gettempdir(), f"nmrun-{os.getuid()}-gpu-{name.replace('/', '-')}.lock"
            )
            file = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            _held[number] = file
            return number
        time.sleep(wait)
