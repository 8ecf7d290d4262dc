"""Files that are either whole or not there, the checkpoint of a run, and the states of the random
number generators.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

CHECKPOINT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def write(path: Path, content: bytes | str) -> None:
    """Write a file so that a kill or a power cut at any moment leaves the old content or the new,
    never a part.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (
        OSError
    ):  # a full disk: what could be written is of no use and takes the place of what is
        partial.unlink(missing_ok=True)
        raise


def save(path: Path, state: dict[str, Any]) -> None:
    """Save tensors and plain data, readable with ``torch.load(weights_only=True)``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write(path, buffer.getvalue())


def save_next(folder: Path, state: dict[str, Any]) -> None:
    """Save as the run's checkpoint; the one before it stays as ``checkpoint.previous.pt``."""
    _keep(folder / CHECKPOINT, folder / PREVIOUS)
    save(folder / CHECKPOINT, state)


def load_last(folder: Path, mapped: bool = False) -> tuple[dict[str, Any] | None, list[str]]:
    """The run's newest checkpoint that is whole, None if there is none, and what is to be said of
    those that are not.

    ``mapped`` leaves its tensors on the disk until they are looked at.
    """
    said = []
    for name in (CHECKPOINT, PREVIOUS):
        try:
            state = load(folder / name, mapped)
        except ValueError as error:
            said.append(f"{name} is damaged ({error})")
            continue
        if state is not None:
            return state, [*said, f"going on from {name}, the one before it"] if said else []
    return None, [*said, "starting over"] if said else []


def _keep(path: Path, previous: Path) -> None:
    """Let ``previous`` be what is at ``path`` now, if anything is, while ``path`` stays as it is at
    every moment.
    """
    partial = previous.with_name(previous.name + ".partial")
    partial.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.link(path, partial)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copyfile(path, partial)
        os.replace(partial, previous)
        # after a kill between this and the next save, the two are one file already, and replacing
        # did nothing
        partial.unlink(missing_ok=True)


def load(path: Path, mapped: bool = False) -> dict[str, Any] | None:
    """What :func:`save` wrote, on the CPU. None if there is no file. Raises ValueError if it is
    damaged, be it by one bit.

    torch writes a checksum of every record and never looks at it again.
    """
    try:
        with zipfile.ZipFile(path) as records:
            broken = records.testzip()
        if broken is not None:
            raise ValueError(f"the checksum of {broken} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        return None
    except Exception as error:  # damage can surface as anything
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    return state


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def random_state() -> dict[str, Any]:
    """The states of the generators of Python, NumPy and torch (CPU and all CUDA devices)."""
    legacy: Any = np.random.get_state()
    _, keys, position, has_gauss, gauss = legacy
    version, numbers, pending = random.getstate()
    return {
        "python": (version, torch.tensor(numbers), pending),
        "numpy": (torch.tensor(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore :func:`random_state`. CUDA generators are left alone where the number of devices has
    changed.
    """
    version, numbers, pending = state["python"]
    random.setstate((version, tuple(numbers.tolist()), pending))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
