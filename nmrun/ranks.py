"""The processes of a run, as ``torchrun`` starts them. Without it there is one, the leader."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from nmrun.errors import leads as leads
from nmrun.errors import rank as rank
from nmrun.errors import world as world

T = TypeVar("T")


def from_leader(value: T) -> T:
    """The leader's value, plain data, on every rank. All ranks must call."""
    if world() > 1:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        value = box[0]
    return value
