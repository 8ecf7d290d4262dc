"""Sharded checkpoints of one process, for test_shards.py and test_fsdp.py: in a group of one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nmrun.lab.train import checkpoint

SHAPES = {"even": (6, 4), "odd": (5, 3), "row": (1, 8)}
# what changes a folder, and leads to what a killed process has left
OPERATIONS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir")


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def values(step: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state(step: int) -> dict[str, Any]:
    """A state with sharded tensors at two depths, in a :func:`group`."""
    mesh = init_device_mesh("cpu", (1,))
    parts = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in values(step).items()}
    plain = {"step": step, "random": [torch.arange(step)]}
    return {"model": parts, "optimizer": {"state": {0: {"moment": parts["odd"]}}}, "loop": plain}


def saved(folder: Path, *steps: int) -> None:
    """Checkpoints of these steps, one after the other."""
    folder.mkdir(exist_ok=True)
    with group():
        for step in steps:
            checkpoint.save_next(folder, state(step))


def save(folder: Path, last: int, die_before: int) -> None:
    """Save checkpoints up to step ``last``; a kill ends the last before the so-manieth of its file
    operations, with exit status 3."""
    torch.set_num_threads(1)
    with group():
        for step in range(1, last):
            checkpoint.save_next(folder, state(step))
        final, done = state(last), 0

        def watch(event: str, args: tuple[Any, ...]) -> None:
            nonlocal done
            writes = event != "open" or (isinstance(args[2], int) and args[2] & os.O_ACCMODE)
            if event in OPERATIONS and writes and str(folder) in str(args[0]):
                if done == die_before:
                    os._exit(3)
                done += 1

        original = os.fsync

        def fsync(number: Any) -> None:
            nonlocal done
            if done == die_before:
                os._exit(3)
            done += 1
            original(number)

        os.fsync = fsync
        sys.addaudithook(watch)
        checkpoint.save_next(folder, final)
        os._exit(0)
