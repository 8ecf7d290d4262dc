"""``nmrun bench update``: what a recipe adds to an optimizer step, against torch's fused AdamW of
the same weights.

The step is what the recipe does to the gradient, AdamW, and the projection into the working copy.
``one pass`` is how runs do it, by one kernel; ``apart`` are the recipe's hooks around torch's fused
step, as with any other optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nmrun import optim
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import NO_MEMORY, Benchmark, Clock, Row, quartiles, ratios, rounds
from nmrun.lab.bench.recipes import ARMS
from nmrun.patterns import Pattern

SHAPE = (3072, 768)  # of a weight: GPT-2's feed-forward layers
WARM_UP = 3  # rounds that are not counted: STEP's second phase begins in them


def optimizer_step(
    recipe: str | None, count: int, pattern: Pattern, device: torch.device, in_one_pass: bool = True
) -> Callable[[], Any]:
    """The optimizer step of some weights under a key of ``ARMS``, or dense."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(SHAPE[1], SHAPE[0], bias=False, device=device) for _ in range(count))
    )
    optimizer = optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if recipe is not None:
        ARMS[recipe](model, optimizer, pattern, ())
    if not in_one_pass:
        optimizer.plan = lambda updates: []  # type: ignore[method-assign]
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = 1e-3 * torch.randn_like(p)
    return optimizer.step


def measure(
    recipe: str, pattern: Pattern, millions: float, count: int, device: torch.device
) -> list[Row]:
    """Both arms of a recipe: milliseconds, and multiples of the dense step of the same rounds."""
    about = {"recipe": recipe, "pattern": str(pattern), "millions": millions}
    weights = max(1, round(millions * 1e6 / (SHAPE[0] * SHAPE[1])))
    make = partial(optimizer_step, count=weights, pattern=pattern, device=device)
    try:
        arms = {
            "dense": make(None),
            "one pass": make(recipe),
            "apart": make(recipe, in_one_pass=False),
        }
        times = rounds(arms, count, Clock(device), WARM_UP)
    except torch.OutOfMemoryError:
        return [{**about, "arm": arm, "wrong": NO_MEMORY} for arm in ("one pass", "apart")]
    return [
        {
            **about, "arm": arm, "n": len(times[arm]), **quartiles("ms", times[arm]), **quartiles("dense_ms", times["dense"]),
            **quartiles("ratio", ratios(times[arm], times["dense"])),
        }
        for arm in ("one pass", "apart")
    ]  # fmt: skip


def benchmark(
    sparsity: Sequence[Pattern], weights: float, recipes: Sequence[str], rounds: int, device: str
) -> Benchmark:
    place = harness.device_of(device)
    omissions: list[str] = []

    def cases() -> Iterator[list[Row]]:
        for pattern in sparsity:
            for recipe in recipes:
                harness.note(f"{recipe} {pattern}")
                try:
                    yield measure(recipe, pattern, weights, rounds, place)
                except ValueError as error:  # a pattern that does not divide the inputs
                    omissions.append(f"{pattern} without {recipe}: {error}")

    def page(rows: list[Row]) -> str:
        dense = next((row["dense_ms"] for row in rows if "dense_ms" in row), float("nan"))
        title = (
            f"An optimizer step of {weights:g} million weights, float32, in multiples of "
            f"torch's fused AdamW ({dense:.3g} ms). Median [quartiles] of paired rounds, n = {harness.samples(rows)}."
        )
        lines = [{**row, "arm": f"{row['pattern']} {row['arm']}"} for row in rows]
        text = harness.grid(lines, "recipe", "arm", lambda row: harness.spread(row, "ratio"))
        return f"{title}\n\n{text}"

    return Benchmark(cases(), page, place, omissions=omissions)
