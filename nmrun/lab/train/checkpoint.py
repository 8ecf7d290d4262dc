"""The checkpoint of a run, and the states of the random number generators.

A checkpoint is ``checkpoint.pt``. What processes hold in shards lies in a folder beside it
(``nmrun.lab.train.fsdp``), which the file names: the folder is whole before the file is, and it is
removed when no file names it any more. Its zip comment is a hash of what it
holds, which a state that was edited and saved again lacks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import random
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nmrun import atomic
from nmrun.errors import RunError, first_line
from nmrun.lab import ranks
from nmrun.lab.runs import documents
from nmrun.lab.runs.run_folder import CHECKPOINT, PREVIOUS

WAIT = 100  # times what a checkpoint took, until the next one by time: 1 % of the run at most
SHARDS = ("checkpoint.shards.0", "checkpoint.shards.1")  # taken in turn
FOREIGN = "was changed, or is not of nmrun"
UNREADABLE = f"is whole, but torch {torch.__version__} does not read what is in it"
# errors of reading something that is no file, or a damaged one, where zipfile seeks before its
# start
OF_DAMAGE = (errno.EINVAL, errno.EISDIR, errno.ELOOP)


class CheckpointClock:
    """Says when a checkpoint by time is due (``every`` seconds; None: never), and counts in
    ``spent`` the seconds of saving in all sessions."""

    def __init__(self, every: float | None) -> None:
        self.every = every
        self.spent = self._took = 0.0
        self.begin()

    def begin(self) -> None:
        self._since = time.perf_counter()

    def due(self) -> bool:
        """Whether it is time: never sooner than ``WAIT`` times what the last checkpoint took."""
        if self.every is None:
            return False
        return time.perf_counter() - self._since >= max(self.every, WAIT * self._took)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._since = time.perf_counter()
        self._took = self._since - began
        self.spent += self._took


def save(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer, "a") as records:
        records.comment = _seal(records)
    atomic.write(path, buffer.getvalue())


def _seal(records: zipfile.ZipFile) -> bytes:
    """A hash of the records' checksums, which stand in the file and are compared besides."""
    sums = [(record.filename, record.CRC) for record in records.infolist()]
    return hashlib.sha256(repr(sums).encode()).hexdigest().encode()


def save_next(folder: Path, state: dict[str, Any]) -> None:
    """Save as the run's checkpoint; the one before it stays as ``checkpoint.previous.pt``. All
    ranks call: the leader writes its state, every rank its part of sharded tensors."""
    free = SHARDS[0]
    if ranks.leads():
        with contextlib.suppress(FileNotFoundError):  # the first, or one that a kill cut short
            os.replace(folder / CHECKPOINT, folder / PREVIOUS)
        in_use = remove_unnamed(folder)
        free = next(name for name in SHARDS if name not in in_use)
    state, parts = _split(state)
    if parts:
        from nmrun.lab.train import fsdp  # half a second that others need not wait for

        state["shards"] = fsdp.save_shards(folder / ranks.from_leader(free), parts)
    if ranks.leads():
        save(folder / CHECKPOINT, state)


def remove_unnamed(folder: Path) -> set[str]:
    """Remove the folders of shards that no checkpoint names; return those that one does."""
    shard_folders = {name for name in SHARDS if (folder / name).exists()}
    if not shard_folders:
        return set()
    named = set()
    for name in (CHECKPOINT, PREVIOUS):
        # a damaged checkpoint names none
        with contextlib.suppress(ValueError):
            named.add(((load(folder / name, mapped=True) or {}).get("shards") or {}).get("folder"))
    for name in shard_folders - named:
        shutil.rmtree(folder / name)
    return shard_folders & named


def remove(folder: Path) -> None:
    for name in (CHECKPOINT, PREVIOUS):
        (folder / name).unlink(missing_ok=True)
    remove_unnamed(folder)


def load_last(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The run's newest checkpoint that is whole, or None, and messages about damaged ones. The one
    returned is ``checkpoint.pt`` from here on.

    All ranks call this, then :func:`complete` with what it returns. In several processes tensors
    stay on the disk until they are used. RunError for a file that another program wrote, and for a
    whole one that torch does not read."""
    several, messages = ranks.world() > 1, list[str]()
    for name in (CHECKPOINT, PREVIOUS):
        state, problem = None, ""
        if ranks.leads():
            try:
                state = load(folder / name, mapped=several)
            except ValueError as error:
                problem = str(error)
        usable, problem, record = ranks.from_leader(
            (state is not None, problem, (state or {}).get("shards"))
        )
        if problem in (FOREIGN, UNREADABLE):
            raise RunError(f"{name} {problem}: move it away, or start over with force=true")
        if record:
            from nmrun.lab.train import fsdp

            problem = fsdp.damaged_shards(folder, record)
        if problem:
            messages.append(f"{name} is damaged ({problem})")
        elif usable:
            if messages:
                messages.append(f"going on from {name}, the one before it")
            if ranks.leads() and name == PREVIOUS:
                # else the next save would keep the damaged one as the previous checkpoint
                os.replace(folder / PREVIOUS, folder / CHECKPOINT)
            ranks.from_leader(None)
            return state if ranks.leads() else _read(folder / CHECKPOINT, mapped=True), messages
    if messages:
        messages.append("starting over")
    return None, messages


def complete(folder: Path, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Add the shards to a state of :func:`load_last`: in parts if ``model`` is sharded, over any
    number of processes, else whole. All ranks call."""
    if record := state.pop("shards", None):
        from nmrun.lab.train import fsdp

        for path, tensor in fsdp.load_shards(folder, record, model).items():
            inner = state
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = tensor
    return state


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[tuple[Any, ...], Any]]:
    """Nested dicts with None in the place of sharded tensors, and those by their paths."""
    rest: dict[str, Any] = {}
    parts: dict[tuple[Any, ...], Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            rest[key], inner = _split(value)
            parts |= {(key, *path): part for path, part in inner.items()}
        elif hasattr(value, "_local_tensor"):
            rest[key], parts[(key,)] = None, value
        else:
            rest[key] = value
    return rest, parts


def load(path: Path, mapped: bool = False) -> dict[str, Any] | None:
    """Load what :func:`save` wrote, on the CPU; None if there is no file. ``mapped`` leaves tensors
    on the disk until they are used.

    torch writes a checksum of every record and never looks at it again: it is checked here.
    ValueError where even one bit of the file is damaged, or torch does not read it. Errors of the
    machine, such as too little memory, are passed on: the file may be whole."""
    is_whole = False
    try:
        with documents.opened(path) as file, zipfile.ZipFile(file) as records:
            broken = records.testzip()
            if broken is not None:
                raise ValueError(f"the checksum of {broken} is wrong")
            if not records.comment:
                raise ValueError(FOREIGN)
            if records.comment != _seal(records):
                raise ValueError("its hash is another")
        is_whole = True
        state = _read(path, mapped)
    except FileNotFoundError:
        return None
    except Exception as error:  # damage can raise any exception
        if out_of_memory(error) or (isinstance(error, OSError) and error.errno not in OF_DAMAGE):
            raise
        raise ValueError(UNREADABLE if is_whole else first_line(error)) from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    return state


def out_of_memory(error: BaseException) -> bool:
    kinds = torch.OutOfMemoryError | MemoryError
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def _read(path: Path, mapped: bool) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def random_state() -> dict[str, Any]:
    """The states of all generators; of CUDA's where something has begun to use it."""
    legacy: Any = np.random.get_state()
    _, keys, position, has_gauss, gauss = legacy
    version, numbers, pending = random.getstate()
    return {
        "python": (version, torch.tensor(numbers), pending),
        "numpy": (torch.tensor(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore :func:`random_state`; CUDA's where the number of devices is the same."""
    version, numbers, pending = state["python"]
    random.setstate((version, tuple(numbers.tolist()), pending))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
