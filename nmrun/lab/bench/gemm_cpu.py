"""The part of ``nmrun bench gemm`` for a CPU: a linear layer's products with an N:M weight.

Three things by shape, tokens and ratio: the forward product; the three products of a training step
with the packing of the weight; the same with the weight gradient at the kept entries alone. float32.
Dense is what torch calls (MKL), or oneDNN, whichever is faster in the median; both are shown. The
dense weight gradient of a packed step is by the faster of the two as well, as it is in a run. With
one thread the clock is the thread's CPU time, with more the wall's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast import measurement
from nmrun.fast.cpu import linear
from nmrun.fast.measurement import ONEDNN
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import Clock, Row, ratios, rounds, speedup
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold

WHAT = {
    "forward": "The forward product",
    "step": "Forward and backward, with packing the weight",
    "masked": "Forward and backward, the weight gradient at the kept entries alone",
}
LIBRARIES = ("torch", "oneDNN")


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T`` by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def measure(
    inputs: int, outputs: int, tokens: int, patterns: Sequence[str], count: int, clock: Clock
) -> list[Row]:
    """Measure all products of one layer.

    Args:
        patterns: such as ``2:4``.

    Returns:
        A row for each of :data:`WHAT`, ratio and arm.
    """
    x, dz = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    full = torch.randn(outputs, inputs)
    reordered = torch.ops.mkldnn._reorder_linear_weight(full, tokens)
    dense: dict[str, dict[str, Callable[[], Any]]] = {
        "torch": {
            "forward": lambda: functional.linear(x, full),
            "step": lambda: (functional.linear(x, full), dz @ full, dz.t() @ x),
        },
        "oneDNN": {
            "forward": lambda: onednn(x, reordered),
            "step": lambda: (onednn(x, full), onednn(dz, full.t()), onednn(dz.t(), x.t())),
        },
    }
    arms: dict[str, Callable[[], Any]] = {
        f"{library} {what}": call
        for library, calls in dense.items()
        for what, call in calls.items()
    }
    wrong: dict[str, str] = {}
    gradient = _gradient(x, dz, count, clock)
    for ratio in patterns:
        weight = hard_threshold(full, Pattern.parse(ratio), 1).contiguous()
        packed = linear.LinearProducts((outputs, inputs), torch.float32, Pattern.parse(ratio))
        packed.write(weight, None)
        forward, backward = map(packed.parts, linear.KINDS)

        def z(weight: Tensor = weight, f: Any = forward, b: Any = backward) -> Tensor:
            return linear.linear(x, weight, None, f, b, "dense")

        def step(
            how: str, packed: Any = packed, weight: Tensor = weight, z: Any = z, f: Any = forward,
            b: Any = backward,
        ) -> None:  # fmt: skip
            packed.write(weight, None)
            z()
            linear.multiply(dz, b, inputs)
            linear.weight_gradient(dz, x, f, how)

        arms[f"{ratio} forward"] = z
        arms[f"{ratio} step"] = partial(step, gradient)
        arms[f"{ratio} masked"] = partial(step, "sampled")
        if found := measurement.fault(z, functional.linear(x, weight)):
            wrong[ratio] = found
    with torch.no_grad():
        times = rounds(arms, count, clock)
    rows = []
    about = {"shape": f"{inputs} to {outputs}", "tokens": tokens}
    for what in WHAT:
        bases = {name: times[f"{name} {'forward' if what == 'forward' else 'step'}"]
                 for name in LIBRARIES}  # fmt: skip
        better = min(bases, key=lambda name: statistics.median(bases[name]))
        for name, taken in bases.items():
            rows.append({**about, "what": what, "arm": name, **speedup(taken, bases[better])})
        for ratio in patterns:
            taken, arm = times[f"{ratio} {what}"], {"arm": ratio, "dense": better}
            over = {f"over_{name}": statistics.median(ratios(bases[name], taken))
                    for name in LIBRARIES}  # fmt: skip
            figures = {"wrong": wrong[ratio]} if ratio in wrong else speedup(taken, bases[better])
            rows.append({**about, "what": what, **arm, **over, **figures})
    return rows


def _gradient(x: Tensor, dz: Tensor, count: int, clock: Clock) -> str:
    """The faster way to a dense weight gradient: torch's or oneDNN's."""
    ways = ("dense", ONEDNN)
    arms = {how: partial(linear.weight_gradient, dz, x, [], how) for how in ways}
    with torch.no_grad():
        times = rounds(arms, count, clock)
    return min(ways, key=lambda how: statistics.median(times[how]))


def page(rows: Sequence[Row]) -> str:
    """A table for each of :data:`WHAT`."""
    parts = [
        "A linear layer's products with an N:M weight on the CPU, float32: how many times as fast "
        "as the better dense product, median [quartiles] of paired rounds, "
        f"n = {max(row.get('n', 0) for row in rows)}, {harness.cpu_clock_name()}. "
        "Dense columns: milliseconds of what torch calls, and of oneDNN."
    ]

    def cell(row: Row) -> str:
        return harness.speed(row, row["arm"] if row["arm"] in LIBRARIES else "")

    for what, title in WHAT.items():
        some = [
            {**row, "size": f"{row['tokens']}, {row['shape']}"}
            for row in rows
            if row["what"] == what
        ]
        text = harness.grid(some, "size", "arm", cell)
        parts.append(f"{title} (tokens, inputs to outputs):\n\n{text}")
    return "\n\n".join(parts)
