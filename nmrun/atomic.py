"""Files that have the old content or the new, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, the user, and one file (ulimit -f)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in the error of a full disk how much is free, while a file is written. Raises OSError
    with a number of ``FULL``, whatever wrote the file; other errors stay as they are."""
    try:
        yield
    except Exception as error:
        # safetensors has an error of its own, which ends with "(os error 28)"
        match = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if number not in FULL:
            raise
        free = shutil.disk_usage(path.parent).free / 1e6
        reason = f"{os.strerror(number)}, {free:.0f} MB free there"
        raise OSError(number, reason, str(path)) from None


@contextlib.contextmanager
def replaced(path: Path, shared: bool = False) -> Iterator[Path]:
    """Replace a file whole: a kill or a power cut at any moment leaves the old content or the new.
    A context with the path to write to, which takes the file's name at the end. ``shared``:
    other processes may replace the file at the same time, and the last one's content stays.
    Raises OSError of a full disk as :func:`disk_errors` says it."""
    owner = f"{os.getpid()}." if shared else ""
    partial = path.with_name(f"{path.name}.{owner}partial")
    with disk_errors(path):
        try:
            partial.unlink(missing_ok=True)
            partial.touch()
            mode = partial.stat().st_mode  # what others may read of a new file here
            yield partial
            partial.chmod(mode)  # safetensors gives its files to their owner alone
            _sync(partial)
            os.replace(partial, path)
        except Exception as error:
            # a full disk: what could be written is of no use and takes the place of what is
            with contextlib.suppress(OSError):  # a disk to read only
                partial.unlink(missing_ok=True)
            if isinstance(error, OSError) and str(error.filename) == str(partial):
                error.filename = str(path)  # nobody asked for the other
            raise


def write(path: Path, content: bytes | str, shared: bool = False) -> None:
    """Write a file whole, text as UTF-8: see :func:`replaced`."""
    with replaced(path, shared) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def sync(folder: Path) -> None:
    """Put the files of a folder on disk, before the folder takes its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            _sync(file)


def _sync(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
