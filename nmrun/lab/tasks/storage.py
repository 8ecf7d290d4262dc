"""Where data are on this machine, and where arrays made of them are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmrun import atomic
from nmrun.errors import ConfigError, RunError
from nmrun.lab.runs import documents, locks

HOME = "~/.cache/nmrun"
LIST = "arrays.json"  # size and SHA-256 of each; without it, arrays are made again

_folders: set[Path] = set()  # folders whose hashes this process has compared


def data_folder() -> Path:
    """``NMRUN_DATA``, default ``~/.cache/nmrun``; it may not exist."""
    return Path(os.environ.get("NMRUN_DATA", HOME)).expanduser()


def cache_folder() -> Path:
    """``NMRUN_CACHE``, default ``~/.cache/nmrun/derived``; it may not exist."""
    return Path(os.environ.get("NMRUN_CACHE", f"{HOME}/derived")).expanduser()


def places(name: str) -> list[Path]:
    """Where a file or folder of data can be: below ``NMRUN_DATA``, or else in the current folder."""
    path = Path(name).expanduser()
    return [data_folder() / path, path]


def path_of(name: str) -> Path:
    """The first of :func:`places` that is there; in the current folder where none is."""
    *first, last = places(name)
    return next((place for place in first if place.exists()), last)


def find(dataset: str, names: Iterable[str], how: str) -> Path:
    """A file or folder below ``NMRUN_DATA`` or in the current folder: the first of ``names`` that
    is there.

    Raises ConfigError if there is none, with ``how`` to get it.
    """
    names = list(names)
    for place in (place for name in names for place in places(name)):
        if place.exists():
            return place
    raise ConfigError(
        f"dataset={dataset}: there is no {' and no '.join(names)} in {data_folder()} (NMRUN_DATA) "
        f"or in the current folder: {how}"
    )


def cached(
    what: Any, sources: Iterable[Path], make: Callable[[], Mapping[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Keep arrays in files below ``NMRUN_CACHE``.

    ``what`` is plain data that, with the paths, sizes and times of change of ``sources``, says
    which arrays they are. ``make`` makes them if they are not there, or other than they were made.
    """
    stats = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources
    ]
    key = hashlib.sha256(json.dumps([what, stats]).encode()).hexdigest()[:20]
    root = cache_folder()
    folder = root / key
    while folder.is_dir():
        if (content := _whole(folder)) is not None:
            return content
        _remove_damaged(folder)
    arrays = make()
    root.mkdir(parents=True, exist_ok=True)
    with locks.folder_beside(folder) as part:
        (half_done := part / key).mkdir()
        for name, array in arrays.items():
            with (half_done / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())  # the folder's new name must not outlive a power cut alone
        records = {name: _about(half_done / f"{name}.npy") for name in arrays}
        atomic.write(half_done / LIST, json.dumps(records) + "\n")
        try:
            half_done.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has written the same arrays first
                raise
    if (content := _whole(folder)) is None:
        raise RunError(f"{folder}: what was written there does not come back; is the disk damaged?")
    return content


def _whole(folder: Path) -> dict[str, NDArray[Any]] | None:
    """The arrays of a folder, mapped; None where they are not those that were written. A process
    looks at the sizes each time, and at the hashes once.
    """
    try:
        records = documents.read_json(folder / LIST)
        if {f"{name}.npy" for name in records} != {path.name for path in folder.glob("*.npy")}:
            return None
        for name, about in records.items():
            path = folder / f"{name}.npy"
            if path.stat().st_size != about["bytes"]:
                return None
            if folder not in _folders and _about(path) != about:
                return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in records}
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError):
        return None
    _folders.add(folder)
    return arrays or None


def _about(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _remove_damaged(folder: Path) -> None:
    """Remove a folder, unless another process is about to, or has put a whole one in its place."""
    with contextlib.suppress(FileNotFoundError), locks.hold(folder) as ours:
        if ours and _whole(folder) is None:
            with locks.folder_beside(folder) as part:
                folder.rename(
                    part / folder.name
                )  # renamed at once, so that nobody sees a part of it
            _folders.discard(folder)
        elif not ours:
            time.sleep(0.1)
