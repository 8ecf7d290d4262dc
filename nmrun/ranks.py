"""One run in several processes, as ``torchrun`` starts them: every rank works on its share of each
batch.

Data are shared out: a rank reads, decodes, augments and pads its micro-batches alone, and evaluates
its batches of a split alone. Random numbers are drawn for a whole batch on each rank, so a share
does not depend on the number of ranks.

Models are replicated (``trainer.distributed=ddp``) or sharded (``fsdp``). Replicated: each rank has
all weights and sees the mean of all gradients, so recipes, clipping, AutoSwitch and the optimizer
do the same everywhere without knowing. Sharded: each rank has its rows of each weight, and no rank
can pass through the model without the others (``nmrun.train.sharded``).

Rank 0, the leader, alone writes files and speaks. Without ``torchrun`` there is one rank, which
leads, and every function here costs nothing.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nmrun.errors import RunError

T = TypeVar("T")


def begin(asked: str = "auto") -> None:
    """Join the other processes, if there are any: by NCCL where each has a GPU of its own, else by
    Gloo. ``asked``: trainer.device.
    """
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


def local_world() -> int:
    """How many of the processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives on this rank. Its RunError on any rank is raised on all, which have to
    call.
    """
    if world() == 1:
        return work()
    done: list[T] = []
    problem = ""
    try:
        done.append(work())
    except RunError as error:
        problem = str(error)
    if any_of(bool(problem)):
        raise RunError(next(filter(None, gathered(problem))))
    return done[0]


def in_step(items: Iterable[T]) -> Iterator[T]:
    """``items`` one by one, as many on all ranks. If a rank cannot have its next one, no rank can."""
    rest = iter(items)
    while item := together(lambda: [*itertools.islice(rest, 1)]):
        yield item[0]


def share(count: int, parts: int) -> range:
    """This rank's part of a whole batch.

    Args:
        count: of micro-batches in the whole batch.
        parts: how many of them are a rank's.

    Returns:
        Their numbers. Fewer, or none, where a batch has too few items.
    """
    return range(rank() * parts, (rank() + 1) * parts)[: max(0, count - rank() * parts)]


def share_statistics(model: nn.Module) -> None:
    """Give every rank the leader's running statistics. All ranks have to call.

    DDP hands them around before a pass in training only, and each rank adds its own batch to them.
    """
    for module in model.modules() if world() > 1 else ():
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                dist.broadcast(buffer, src=0)


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
