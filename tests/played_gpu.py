"""2:4 products and the GPU for them, played on a CPU: a path that stores half the values, and times
that are made up.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import operands
import torch
import torch.nn.functional as F
from torch import Tensor

import nmrun
from nmrun.fast import acceleration, measurement
from nmrun.fast.gpu import probe, semi_structured

normal = functools.partial(operands.normal, dtype=torch.float64)


def both_ways(rows: int, columns: int) -> Tensor:
    weight = normal(rows, columns, seed=3)
    return weight * nmrun.sparsity.transposable_mask(weight, "2:4")


def along_inputs(rows: int, columns: int) -> Tensor:
    return nmrun.sparsity.hard_threshold(normal(rows, columns, seed=4), "2:4")


def two_values(weight: Tensor) -> list[Tensor]:
    """Half the values and where they stood: whoever has more than two non-zeros in a group loses
    some.
    """
    groups = weight.contiguous().unflatten(1, (-1, 4))
    order = (groups != 0).int().sort(dim=2, descending=True, stable=True).indices
    where = order[..., :2].contiguous()
    return [groups.gather(2, where).contiguous(), where]


def multiply(x: Tensor, parts: list[Tensor], bias: Tensor | None) -> Tensor:
    values, where = parts
    weight = values.new_zeros(*values.shape[:2], 4).scatter(2, where, values).flatten(1)
    return F.linear(x, weight, bias)


COMPRESSED = semi_structured.Path(two_values, multiply)
# the zeros are multiplied too
MASKED = semi_structured.Path(
    lambda weight: [weight.clone()], lambda x, parts, bias: F.linear(x, parts[0], bias)
)


class Machine:
    """A GPU that is none: ``milliseconds`` by what a call does, and how often it was asked."""

    def __init__(self) -> None:
        self.dense, self.fast, self.pack, self.timed = 3.0, 1.0, 0.0, 0

    def milliseconds(self, call: Any, repeats: int = 20, graph: bool = False) -> float:
        self.timed += 1
        if isinstance(call, functools.partial):  # of a path's product
            return self.fast
        used = set(call.__code__.co_names)
        if {"pack", "write"} & used:
            return self.pack
        return self.fast if {"multiply", "once"} & used else self.dense


def current_gpus(setattr: Callable[[Any, str, Any], None]) -> list[torch.device]:
    """The GPUs that are torch's current one at this moment, the last one in front of the others."""
    current: list[torch.device] = []

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    setattr(torch.cuda, "device", entered)
    return current


def play(setattr: Callable[[Any, str, Any], None], cache: Path) -> Machine:
    """Let ``nmrun`` see this machine; ``setattr`` may be that of pytest's monkeypatch."""
    machine = Machine()
    setattr(semi_structured, "PATHS", {"compressed": COMPRESSED})
    setattr(semi_structured, "milliseconds", machine.milliseconds)
    setattr(torch.cuda, "get_device_name", lambda device=None: "Test GPU")
    setattr(measurement, "cache_folder", lambda: cache)
    setattr(probe, "obstacle", lambda device: "")
    setattr(acceleration, "_side", lambda device: probe)
    return machine
