"""What one process at a time has: a folder to work in, a GPU.

A folder is held by two things. An flock goes with its process, however that ends; some file systems
have none (Lustre, some FUSE), and on NFS it is one host's. So there is a lease beside it, the file
``.lease`` with the holder's host and process, whose time is set anew every ``BEAT`` seconds. After
``STALE`` seconds without that another host may take the folder over.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

LEASE = ".lease"
BEAT, STALE = 10.0, 120.0  # seconds
SETTLES = 1.0  # seconds in which hosts that take over at the same time see each other

# open files with locks; a process that is forked lets them go, or they would outlive their holder
_files: set[int] = set()


def _let_go() -> None:
    while _files:
        os.close(_files.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Hold the folder while entered; False if another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    _files.add(handle)
    try:
        # held() may be looking just now
        waits = (0, 0.02, 0.05, 0.1, 0.2)
        free = next(
            (got for wait in waits if (got := _flock(handle, wait=wait)) is not False), False
        )
        if free is False:
            yield False
        else:
            with _leased(folder, sure=free is True) as ours:
                yield ours
    finally:
        _files.discard(handle)
        os.close(handle)


def held(folder: Path) -> bool:
    """Whether a live process holds the folder; asking disturbs neither it nor one that is about to
    take the lock.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        # shared, so that two who ask do not see each other
        free = _flock(handle, shared=True)
    finally:
        os.close(handle)
    return free is False or _lives(folder / LEASE, time.time(), sure=free is True)


def holder(folder: Path) -> str:
    """Words for who holds the folder: ``process 12 on node7``; empty if it does not say."""
    lease = _read(folder / LEASE)
    return f"process {lease['pid']} on {lease['host']}" if lease else ""


def _flock(handle: int, shared: bool = False, wait: float = 0) -> bool | None:
    """Whether the lock is ours now; None where there are no such locks."""
    time.sleep(wait)
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# --- the lease ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _leased(folder: Path, sure: bool) -> Iterator[bool]:
    """Have the lease while entered; False if another process has it. ``sure``: no other process of
    this host has.
    """
    path, own = folder / LEASE, _own()
    try:
        ours = _taken(path, own, sure)
    except OSError:  # a full disk, say, of which the run itself has more to tell
        yield True
        return
    if not ours:
        yield False
        return
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, ended), daemon=True)
    beat.start()
    try:
        yield True
    finally:
        ended.set()
        beat.join()
        if _read(path) == own:
            path.unlink(missing_ok=True)


def _taken(path: Path, own: dict[str, Any], sure: bool) -> bool:
    text = json.dumps(own)
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(text)
        return True
    new = path.with_name(f"{LEASE}-{own['boot']}-{own['pid']}")
    new.write_text(text)
    try:
        # the file system's clock, which set the lease's time
        if _lives(path, new.stat().st_mtime, sure):
            return False
        before = _read(path)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    if before is None or before["boot"] != own["boot"]:
        time.sleep(SETTLES)
    return _read(path) == own


def _lives(path: Path, now: float, sure: bool) -> bool:
    """Whether the lease's holder is at work."""
    try:
        beat = path.stat().st_mtime
    except OSError:
        return False
    lease = _read(path)
    if lease is not None and lease["boot"] == _own()["boot"]:
        if sure:
            return False
        with contextlib.suppress(PermissionError):  # somebody else's process lives too
            try:
                os.kill(int(lease["pid"]), 0)
            except ProcessLookupError:
                return False
    return now - beat < STALE


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path)


def _own() -> dict[str, Any]:
    host = platform.node()
    try:  # hosts may have one name; containers of one host have one boot
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = host
    return {"host": host, "pid": os.getpid(), "boot": boot}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        lease = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return lease if isinstance(lease, dict) and {"host", "pid", "boot"} <= lease.keys() else None


# GPU: the open lock file, which a sweep's next run in the same process keeps
_held: dict[int, int] = {}


def free_gpu(count: int, wait: float = 1.0) -> int:
    """Take a GPU that no other process holds by this function, and wait for one if need be.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs, so locks go by what it lists.

    Args:
        count: of the GPUs that torch sees.
        wait: seconds between two looks.

    Returns:
        The GPU's number; it is this process's own until the process ends.
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
