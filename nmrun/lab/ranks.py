"""One run in several processes, as ``torchrun`` starts them: each rank has a share of each batch.

A rank reads, decodes, augments and pads only its micro-batches, and evaluates only its batches of a
split. Random numbers are drawn for the whole batch on each rank, so no sample depends on the number
of ranks.

Models are replicated (``trainer.distributed=ddp``) or sharded (``fsdp``). Replicated: each rank has
all weights and the mean of all gradients, so recipes, clipping, AutoSwitch and the optimizer do the
same on all ranks. Sharded: each rank has its rows of each weight, and all ranks must pass through
the model together (``nmrun.lab.train.fsdp``).

Only rank 0, the leader, writes files and prints. Without ``torchrun`` there is one rank, the
leader, and no function here communicates.
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
from nmrun.ranks import from_leader as from_leader
from nmrun.ranks import leads as leads
from nmrun.ranks import rank as rank
from nmrun.ranks import world as world

T = TypeVar("T")


def begin(device: str = "auto") -> None:
    """Join the other processes, if there are any: by NCCL on GPUs, else by Gloo. ``device``:
    ``trainer.device``; ``"cpu"`` uses no GPU."""
    if world() == 1 or dist.is_initialized():
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    atexit.register(dist.destroy_process_group)


def local_rank() -> int:
    """Return the number of this process on this machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def gathered(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks, on every rank. All ranks must call.
    ``value``: plain data and CPU tensors."""
    everyone: list[Any] = [value] * world()
    if world() > 1:
        dist.all_gather_object(everyone, value)
    return everyone


def any_of(flag: bool) -> bool:
    """Say whether a flag is set on any rank. All ranks must call.

    A signal, for one, may reach one rank earlier than another.
    """
    return each_of_any(flag)[0]


def each_of_any(*flags: bool) -> tuple[bool, ...]:
    """As :func:`any_of` for several flags, in one communication."""
    if world() == 1:
        return flags
    votes = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(votes)
    return tuple(vote > 0 for vote in votes.tolist())


def total(value: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place. All ranks must call."""
    if world() > 1:
        dist.all_reduce(value)
    return value


def together(work: Callable[[], T]) -> T:
    """Do work on every rank, and fail on all ranks if it fails on one. All ranks must call. Returns
    the result of this rank's work. Raises RunError where the work raised one on any rank."""
    if world() == 1:
        return work()
    results: list[T] = []
    problem = ""
    try:
        results.append(work())
    except RunError as error:
        problem = str(error)
    if any_of(bool(problem)):
        raise RunError(next(filter(None, gathered(problem))))
    return results[0]


def in_step(items: Iterable[T]) -> Iterator[T]:
    """Yield items one by one. Where a rank's next item fails, no rank gets its next one. ``items``:
    this rank's items, as many as on the other ranks. Raises RunError where the items of any rank
    raised one."""
    rest = iter(items)
    while item := together(lambda: [*itertools.islice(rest, 1)]):
        yield item[0]


def share(count: int, parts: int) -> range:
    """The numbers of this rank's micro-batches of a whole batch of ``count``: ``parts``, or
    fewer where the batch has too few."""
    return range(rank() * parts, (rank() + 1) * parts)[: max(0, count - rank() * parts)]


def share_statistics(model: nn.Module) -> None:
    """Give every rank the leader's running statistics, in place. All ranks must call.

    DDP broadcasts them only before a forward pass in training, in which each rank then adds its own
    batch.
    """
    if world() == 1:
        return
    for module in model.modules():
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                dist.broadcast(buffer, src=0)
