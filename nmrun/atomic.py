"""Files that have the old content or the new, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path, shared: bool = False) -> Iterator[Path]:
    """Replace a file whole: a kill or a power cut at any moment leaves the old content or the new.

    Args:
        path: the file.
        shared: other processes may replace it at the same time; the last one's content stays.

    Returns:
        A context with the path to write to, beside the file; it takes the file's name at the end.
    """
    owner = f"{os.getpid()}." if shared else ""
    partial = path.with_name(f"{path.name}.{owner}partial")
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode  # what others may read of a new file here
        yield partial
        partial.chmod(mode)  # safetensors gives its files to their owner alone
        _sync(partial)
        os.replace(partial, path)
    except Exception:
        # a full disk: what could be written is of no use and takes the place of what is
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, content: bytes | str, shared: bool = False) -> None:
    """Write a file whole: see :func:`replaced`.

    Args:
        path: the file.
        content: bytes, or text for UTF-8.
        shared: other processes may write it at the same time.
    """
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
