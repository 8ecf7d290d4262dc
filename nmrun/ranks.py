"""One run in several processes, as ``torchrun`` starts them: every rank holds the whole model and works on its share of each batch.

All ranks build the same parts from the same seed and see the same gradient after it is summed, so recipes, clipping, AutoSwitch and
the optimizer do the same everywhere without knowing. Rank 0, the leader, alone writes files and speaks. Without ``torchrun`` there is
one rank, which leads, and every function here costs nothing.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def begin(asked: str = "auto") -> None:
    """Join the other processes, if there are any: by NCCL where each has a GPU of its own, else by Gloo. ``asked``: trainer.device."""
    if world() == 1 or dist.is_initialized():
        return
    on_gpu = asked != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    atexit.register(dist.destroy_process_group)


def world() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of those on this machine this is: the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def leads() -> bool:
    """Whether this process writes files and speaks."""
    return rank() == 0


def from_leader(value: T) -> T:
    """The leader's value of plain data, everywhere."""
    if world() > 1:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        value = box[0]
    return value


def gathered(value: T) -> list[T]:
    """Every rank's value of plain data and CPU tensors, in the order of ranks, everywhere."""
    everyone: list[Any] = [value] * world()
    if world() > 1:
        dist.all_gather_object(everyone, value)
    return everyone


def any_of(flag: bool) -> bool:
    """Whether it is so on any rank: a signal may reach one earlier than another."""
    if world() == 1:
        return flag
    votes = torch.tensor([float(flag)])
    dist.all_reduce(votes)
    return bool(votes.item())


def total(value: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if world() > 1:
        dist.all_reduce(value)
    return value


def part_like(value: Any, like: Any) -> Any:
    """This rank's part of a whole tensor, where a tensor of its shape is sharded.

    Args:
        value: a tensor that every rank has whole, or anything else.
        like: a parameter, sharded (a ``DTensor``) or not.

    Returns:
        A tensor of the parameter's placement with memory of its own; any other value as it is.
    """
    sharded = hasattr(like, "_local_tensor") and isinstance(value, Tensor)
    if not sharded or hasattr(value, "_local_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None).clone()


def share(batches: list[T], parts: int) -> list[T]:
    """This rank's ``parts`` of the micro-batches of a whole batch. Fewer, or none, where a batch has too few items."""
    return batches[rank() * parts : (rank() + 1) * parts]
