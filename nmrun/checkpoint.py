"""Checkpoints that survive being killed at any moment."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file, force it to disk, then put it in the place of ``path`` in one step."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save(path: Path, state: dict[str, Any]) -> None:
    """Tensors, numbers, texts, lists and dictionaries, so that ``torch.load(path, weights_only=True)`` reads it."""
    write_atomically(path, lambda temporary: torch.save(state, temporary))


def load(path: Path, device: torch.device) -> dict[str, Any] | None:
    """The state, or None where there is no checkpoint. Raises RuntimeError or the like for a damaged file."""
    return torch.load(path, map_location=device, weights_only=True) if path.exists() else None


def random_state() -> dict[str, Any]:
    """The state of torch's, NumPy's and Python's global generators, as tensors and plain values."""
    name, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *(float(r) for r in rest)],
        "python": [version, list(internal), gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
