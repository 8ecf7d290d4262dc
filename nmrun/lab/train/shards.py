"""The part of a checkpoint that every process writes for itself: its shards, in a folder of files by
``torch.distributed.checkpoint``, which gives them to any other number of processes too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard, empty

from nmrun import ranks
from nmrun.errors import RunError

Parts = Mapping[tuple[Any, ...], Any]  # sharded tensors by their path in a nested dict


def save(folder: Path, parts: Parts) -> dict[str, Any]:
    """Write a folder of shards. All ranks call; when they return, it is whole and on the disk.

    Args:
        folder: it is not there yet. All processes see it.
        parts: one-dimensionally sharded tensors (``DTensor``), the same on all ranks.

    Returns:
        What :func:`damage` and :func:`load` need: plain data.

    Raises:
        RunError: where a file cannot be written. The folder is removed.
    """
    named = {_key(path): part for path, part in parts.items()}
    try:
        writer = filesystem.FileSystemWriter(folder)
        _plainly(lambda: state_dict_saver.save(named, storage_writer=writer))
    except RunError:
        if ranks.leads():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    names: list[str] = []
    if ranks.leads():
        names = sorted(os.listdir(folder))
        sync(folder)
    return {
        "folder": folder.name,
        "files": _prints(folder, ranks.from_leader(names)),
        "tensors": {
            path: (part.shape, part.dtype, part.placements[0].dim) for path, part in parts.items()
        },
    }


def damage(folder: Path, record: dict[str, Any]) -> str:
    """What is wrong with the files of a folder; an empty string if they are as they were written,
    bit for bit. All ranks call; each reads some of the files.

    Args:
        record: what :func:`save` returned.
    """
    place = folder / record["folder"]
    found = _prints(place, sorted(record["files"]))
    wrong = [name for name, own in record["files"].items() if found[name] != own]
    return f"the checksum of {record['folder']}/{wrong[0]} is wrong" if wrong else ""


def load(folder: Path, record: dict[str, Any], model: nn.Module) -> dict[tuple[Any, ...], Tensor]:
    """Read a folder of shards. All ranks call.

    Args:
        record: what :func:`save` returned, maybe in another number of processes.

    Returns:
        This process's parts if the model is sharded, whole tensors on the CPU if not.

    Raises:
        RunError: where a file cannot be read.
    """
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    tensors: dict[tuple[Any, ...], Tensor] = {}
    for path, (shape, dtype, dim) in record["tensors"].items():
        if not meshes:
            tensors[path] = torch.empty(shape, dtype=dtype)
        else:
            placed = [Shard(dim)]
            tensors[path] = empty(shape, dtype=dtype, device_mesh=meshes[0], placements=placed)
    named: dict[str, Any] = {_key(path): tensor for path, tensor in tensors.items()}
    reader = filesystem.FileSystemReader(folder / record["folder"])
    _plainly(lambda: state_dict_loader.load(named, storage_reader=reader))
    return tensors


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk, as ``fsync`` has a file's content."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _key(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _plainly(work: Callable[[], object]) -> None:
    """Torch's exception is none of ``Exception``, and tells a traceback of each rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            work()
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise RunError(f"the shards of rank {rank}: {type(reason).__name__}: {reason}") from error


def _prints(folder: Path, names: list[str]) -> dict[str, str]:
    """Checksums by the names of files, empty for what cannot be read. Every rank reads its share."""
    own = {}
    for name in names[ranks.rank() :: ranks.world()]:
        try:
            with (folder / name).open("rb") as file:
                own[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            own[name] = ""
    return {name: digest for part in ranks.gathered(own) for name, digest in part.items()}
