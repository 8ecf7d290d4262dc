"""Files that are either whole or not there, the checkpoint of a run, and the states of the random number generators."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def write(path: Path, content: bytes | str) -> None:
    """Write a file so that a kill or a power cut at any moment leaves the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def save(path: Path, state: dict[str, Any]) -> None:
    """Save tensors and plain data, readable with ``torch.load(weights_only=True)``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any] | None:
    """What :func:`save` wrote, on the CPU. None if there is no file. Raises ValueError if it is damaged."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
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
    """Restore :func:`random_state`. CUDA generators are left alone where the number of devices has changed."""
    version, numbers, pending = state["python"]
    random.setstate((version, tuple(numbers.tolist()), pending))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
