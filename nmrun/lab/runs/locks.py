"""Locks on what one process at a time may use: a folder, a GPU.

A lock is an flock on a file, which goes with its process however that ends. In a folder that is
the file ``.lock``, which names its holder. NFS and Lustre (with ``-o flock``) pass flocks on to
other hosts. Where a file system refuses them, one in the folder for temporary files stands in: it
keeps apart the processes of this user on this host, and no others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nmrun.lab.runs import documents

NAME, PARTIAL = ".lock", ".partial-"
# seconds between tries, since is_locked() holds a lock for a moment, and a folder may be being
# deleted
WAITS = (0, 0.02, 0.05, 0.1, 0.2)

# open files with locks; a process that is forked lets them go, or they would outlive their holder
_files: set[int] = set()


def _let_go() -> None:
    while _files:
        os.close(_files.pop())


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Hold a folder while entered; False if another process has it, or has deleted it just now.
    OSError where the folder takes no file."""
    handles: dict[Path, int] = {}
    for wait in WAITS:
        time.sleep(wait)
        if handles := _lock_files(folder):
            break
    try:
        # on a full disk the lock works without its text
        with contextlib.suppress(OSError):
            if handles:
                (folder / NAME).write_text(f"process {os.getpid()} on {platform.node()}\n")
        yield bool(handles)
    finally:
        for path, handle in handles.items():
            # the folder may have been deleted, and made anew by another process
            with contextlib.suppress(OSError):
                if _is(handle, path):
                    path.unlink()
        _close(handles)


@contextlib.contextmanager
def folder_beside(place: Path) -> Iterator[Path]:
    """A temporary folder next to ``place``, to be renamed to it once complete. It is removed at the
    end, like those that killed processes have left there."""
    for remnant in place.parent.glob(f".*{PARTIAL}*/"):
        with contextlib.suppress(OSError), hold(remnant) as ours:  # another user's, say
            if ours:
                shutil.rmtree(remnant, ignore_errors=True)
    while True:
        try:
            part = Path(tempfile.mkdtemp(prefix=f".{place.name}{PARTIAL}", dir=place.parent))
        except OSError as error:
            error.filename = str(place)  # nobody asked for the other
            raise
        with hold(part) as ours:
            if not ours and not part.exists():  # another process took it for a remnant
                continue
            try:
                yield part
            finally:
                shutil.rmtree(part, ignore_errors=True)
            return


def is_locked(folder: Path) -> bool:
    """Whether a live process holds the folder; asking disturbs neither it nor one that is about
    to."""
    for path in _places(folder):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
        except OSError:
            return False
        try:
            return not _flock(handle, fcntl.LOCK_SH)  # shared: two who ask do not see each other
        except OSError:  # the file system has no such locks
            continue
        finally:
            os.close(handle)
    return False


def holder(folder: Path) -> str:
    """The process that holds the folder, if known: ``process 12 on node7``."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if text := documents.read(folder / NAME).decode().strip():
            return text
    return "another process"


def _lock_files(folder: Path) -> dict[Path, int]:
    """The locked files by name, open: ``.lock`` and what stands in for it; none where others have
    them."""
    handles: dict[Path, int] = {}
    ours = False
    try:
        for path in _places(folder):
            handles[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            _files.add(handles[path])
            with contextlib.suppress(OSError):
                ours = _flock(handles[path], fcntl.LOCK_EX)
                break
        # who had it before may have deleted the file since it was opened
        ours = ours and all(_is(handle, path) for path, handle in handles.items())
    except FileNotFoundError:  # the folder is being deleted
        pass
    finally:
        if not ours:
            _close(handles)
    return handles if ours else {}


def _close(handles: dict[Path, int]) -> None:
    for handle in handles.values():
        _files.discard(handle)
        os.close(handle)


def _flock(handle: int, kind: int) -> bool:
    """Try to take the lock; whether it is ours now. OSError where the file system has no such
    locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _places(folder: Path) -> Iterator[Path]:
    """The file that is locked; and what stands in for it, which is seldom asked for."""
    yield folder / NAME
    yield _temporary(hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:20])


def _temporary(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"nmrun-{os.getuid()}-{name}.lock")


# GPU: the open lock file, which a sweep's next run in the same process keeps
_gpus: dict[int, int] = {}


def free_gpu(count: int, wait: float = 1.0) -> int:
    """Take a GPU that no other process holds by this function, until this one ends; wait for one if
    need be.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs, so locks go by what it lists.
    """
    if _gpus:
        return next(iter(_gpus))
    visible = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    names = visible if len(visible) == count else [str(number) for number in range(count)]
    while True:
        for number, name in enumerate(names):
            place = _temporary(f"gpu-{name.replace('/', '-')}")
            file = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
            if _flock(file, fcntl.LOCK_EX):
                _gpus[number] = file
                return number
            os.close(file)
        time.sleep(wait)
