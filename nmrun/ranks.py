"""The processes of a run, as ``torchrun`` starts them. Without it there is one, the leader."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
import torch.distributed as dist

from nmrun.errors import leads as leads

T = TypeVar("T")


def world() -> int:
    """The number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among them, from 0."""
    return int(os.environ.get("RANK", "0"))


def from_leader(value: T) -> T:
    """The leader's value, plain data, on every rank. All ranks must call."""
    if world() > 1:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        value = box[0]
    return value
