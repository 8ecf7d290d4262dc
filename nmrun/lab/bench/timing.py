"""Clocks, rounds in which the arms take turns, and what they sum up to."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nmrun.fast import backends24

# bytes that are written between two measurements on a GPU: more than any L2, and time for the host
# to get ahead
FLUSHED = 1 << 29
NO_MEMORY = "out of memory"
Row = dict[str, Any]


class Clock:
    """Milliseconds of a call on a device: on a GPU between two events, on a CPU by the wall.

    Args:
        device: the device.
        flush: on a GPU, write to other memory before, which empties its L2 cache.
    """

    def __init__(self, device: torch.device, flush: bool = True) -> None:
        self.gpu = device.type == "cuda"
        self.other = (
            torch.empty(FLUSHED, dtype=torch.int8, device=device) if self.gpu and flush else None
        )

    def __call__(self, call: Callable[[], object]) -> float:
        if not self.gpu:
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.other is not None:
            self.other.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def rounds(
    arms: Mapping[str, Callable[[], object]],
    count: int,
    clock: Callable[[Callable[[], object]], float],
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Time arms in turns: a round runs every arm once, in an order shuffled anew.

    Args:
        arms: what is timed, by name.
        count: rounds.
        clock: gives the milliseconds of a call.
        warm_up: rounds before, which do not count.

    Returns:
        The milliseconds of each arm, round by round.
    """
    shuffled, times = random.Random(0), {name: list[float]() for name in arms}
    for _ in range(warm_up):
        for call in arms.values():
            clock(call)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            for name in shuffled.sample(list(arms), len(arms)):
                times[name].append(clock(arms[name]))
    finally:
        if collecting:
            gc.enable()
    return times


def quartiles(name: str, values: Sequence[float]) -> Row:
    """Compute a median and its quartiles.

    Args:
        name: the key of the median; quartiles have ``name_q1`` and ``name_q3``.
        values: at least one.
    """
    q1, median, q3 = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return {name: median, f"{name}_q1": q1, f"{name}_q3": q3}


def speedup(times: Sequence[float], base: Sequence[float]) -> Row:
    """Milliseconds, and how many times as fast as ``base`` in the same rounds."""
    ratios = [b / t for b, t in zip(base, times, strict=True)]
    return {"n": len(times), **quartiles("ms", times), **quartiles("speedup", ratios)}


def fault(call: Callable[[], Tensor], expected: Tensor) -> str:
    """Say what is wrong with a product, if anything (``backends24.fault``).

    Args:
        call: computes it.
        expected: its result.

    Returns:
        A reason, too little memory among them; empty for none.
    """
    try:
        return backends24.fault(call, expected)
    except torch.OutOfMemoryError:
        return NO_MEMORY
