"""Where data are on this machine, and where arrays made of them are kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmrun import atomic
from nmrun.errors import ConfigError
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import expanded

HOME = "~/.cache/nmrun"

_compared: set[Path] = set()  # files whose hashes this process has compared


def data_folder() -> Path:
    """``NMRUN_DATA``, default ``~/.cache/nmrun``; it may not exist."""
    return expanded(os.environ.get("NMRUN_DATA", HOME))


def cache_folder() -> Path:
    """``NMRUN_CACHE``, default ``~/.cache/nmrun/derived``; it may not exist."""
    return expanded(os.environ.get("NMRUN_CACHE", f"{HOME}/derived"))


def path_of(*names: str) -> Path:
    """The first of some files or folders that is below ``NMRUN_DATA``, or else in the current folder;
    the last place where none is there."""
    paths = [expanded(name) for name in names]
    places = [place for path in paths for place in (data_folder() / path, path)]
    return next((place for place in places if place.exists()), places[-1])


def find(dataset: str, names: Sequence[str], how: str) -> Path:
    """:func:`path_of` some names. Raises ConfigError if none is there, with ``how`` to get it."""
    place = path_of(*names)
    if not place.exists():
        raise ConfigError(
            f"dataset={dataset}: there is no {' and no '.join(names)} in {data_folder()} (NMRUN_DATA) "
            f"or in the current folder: {how}"
        )
    return place


def key_of(what: Any, sources: Iterable[Path]) -> str:
    """A name for what is made of files: a hash of ``what``, plain data, and of the files' paths, sizes and
    times of change."""
    stats = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources
    ]
    return hashlib.sha256(json.dumps([what, stats]).encode()).hexdigest()[:20]


def cached(
    what: Any, sources: Iterable[Path], make: Callable[[], dict[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Keep arrays in a file below ``NMRUN_CACHE``, and give them back mapped.

    ``what`` and ``sources`` say which arrays they are, see :func:`key_of`. ``make`` makes them if they are
    not there, or other than they were made.
    """
    from safetensors.numpy import save_file

    file = cache_folder() / f"{key_of(what, sources)}.safetensors"
    if (kept := _read(file)) is not None:
        return kept
    file.parent.mkdir(parents=True, exist_ok=True)
    with locks.folder_beside(file) as part:
        arrays = make()
        save_file(arrays, part / file.name, {"sha256": _digest(arrays)})
        atomic.sync(part)  # the file's new name must not outlive a power cut alone
        os.replace(part / file.name, file)
    del arrays
    return _arrays(file)


def _read(file: Path) -> dict[str, NDArray[Any]] | None:
    """The arrays of a file; None where it is not there, or they are not those that were written. A
    process looks at the hash once."""
    from safetensors import SafetensorError, safe_open

    try:
        arrays = _arrays(file)
        with safe_open(file, "np") as opened:
            digest = (opened.metadata() or {}).get("sha256")
    except (OSError, SafetensorError):
        return None
    if file not in _compared and _digest(arrays) != digest:
        return None
    _compared.add(file)
    return arrays


def _arrays(file: Path) -> dict[str, NDArray[Any]]:
    from safetensors.torch import load_file  # it maps, which safetensors.numpy does not

    return {name: tensor.numpy() for name, tensor in load_file(file).items()}


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
