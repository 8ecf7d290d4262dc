"""``nmrun bench recipes``: how much longer a training step takes under each recipe than dense
training, on this machine's CPU.

A step is forward, backward and optimizer step, with the memory layout and the kernel for the update
that runs have. All arms live in one process, start from the same weights and see the same batch; a
round runs every arm once in a shuffled order, and a ratio is an arm's time over the dense time of
the same round, so that a machine that grows slower or faster meanwhile does not favour anyone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmrun import optim
from nmrun.errors import ConfigError
from nmrun.lab.bench import output
from nmrun.lab.bench.arms import ARMS, WORKLOADS, Attach
from nmrun.lab.bench.machine import hardware
from nmrun.lab.train.build import fuse, lay_out
from nmrun.patterns import Pattern

DEVICE = torch.device("cpu")
SHORTEST = (
    0.05  # seconds a measurement takes at least: several steps of a small model, one of a large one
)
WARM_UP = 3  # rounds that are not counted: caches, oneDNN's first calls, the switch of STEP and ASP


class Arm:
    """One copy of the model with its optimizer, and the training step that is timed.

    Args:
        model: it is copied.
        attach: makes the copy sparse, and gives its optimizer.
        pattern: of the weights.
        exclude: modules that stay dense.
    """

    def __init__(
        self, model: nn.Module, attach: Attach, pattern: Pattern, exclude: Sequence[str]
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-4)
        self.handle = attach(self.model, self.optimizer, pattern, exclude)
        fuse(self.optimizer, DEVICE)

    def seconds(self, batch: Tensor, steps: int) -> float:
        """Measure the seconds of a step.

        Args:
            batch: the input.
            steps: how many the mean is over.
        """
        start = time.perf_counter()
        for _ in range(steps):
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / steps


@dataclass(frozen=True)
class Row:
    """One arm's time over dense: quartiles of ``n`` per-round ratios, and the median milliseconds
    of its step.
    """

    model: str
    pattern: str
    recipe: str
    ratio: float
    q1: float
    q3: float
    n: int
    ms: float
    dense_ms: float


def measure(
    name: str, pattern: Pattern, recipes: Sequence[str], rounds: int, left_out: list[str]
) -> list[Row]:
    """Measure recipes against dense training, in one process.

    Args:
        name: of a workload.
        pattern: of the weights.
        recipes: keys of ``ARMS``.
        rounds: ratios of each recipe.
        left_out: gets a line for each reason why recipes cannot train this model at this pattern.

    Returns:
        A row for each recipe that can; none where the model cannot have the pattern.
    """
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model, batch = workload.build().train(), torch.randn(workload.shape)
    lay_out(model, DEVICE, "fp32")
    arms = {"dense": Arm(model, ARMS["dense_again"], pattern, ())}
    cannot: dict[str, list[str]] = {}
    for recipe in recipes:
        try:
            arms[recipe] = Arm(model, ARMS[recipe], pattern, workload.exclude)
        except ValueError as error:
            cannot.setdefault(str(error), []).append(recipe)
    left_out += [
        f"{name} {pattern} without {', '.join(some)}: {why}" for why, some in cannot.items()
    ]
    recipes = [recipe for recipe in recipes if recipe in arms]
    if cannot and set(recipes) <= {"dense_again"}:
        return []
    for _ in range(WARM_UP):
        once = [arm.seconds(batch, 1) for arm in arms.values()]
    steps = math.ceil(SHORTEST / min(once))
    shuffled = random.Random(0)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for arm in shuffled.sample(list(arms), len(arms)):
                times[arm].append(arms[arm].seconds(batch, steps))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    dense = times["dense"]
    rows = []
    for recipe in recipes:
        ratios = [t / d for t, d in zip(times[recipe], dense, strict=True)]
        q1, middle, q3 = (
            statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        )
        ms, dense_ms = 1e3 * statistics.median(times[recipe]), 1e3 * statistics.median(dense)
        rows.append(Row(name, str(pattern), recipe, middle, q1, q3, rounds, ms, dense_ms))
    return rows


def markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Make the table of ratios, recipes down and model with pattern across.

    Args:
        rows: of :func:`measure`.
        machine: of :func:`nmrun.lab.bench.machine.hardware`.
    """
    columns = list(dict.fromkeys((row.model, row.pattern) for row in rows))
    cells = {(row.recipe, row.model, row.pattern): row for row in rows}
    lines = [
        "Time of a training step over the dense step: median [quartiles] of per-round ratios.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"n = {rows[0].n} rounds, float32, AdamW.",
        "",
        "| recipe | " + " | ".join(f"{model} {pattern}" for model, pattern in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    dense = {(row.model, row.pattern): row.dense_ms for row in rows}
    lines.append("| dense | " + " | ".join(f"{dense[column]:.3g} ms" for column in columns) + " |")
    for recipe in dict.fromkeys(row.recipe for row in rows):
        ratios = [cells.get((recipe, *column)) for column in columns]
        shown = (f"{r.ratio:.3f} [{r.q1:.3f}, {r.q3:.3f}]" if r else "" for r in ratios)
        lines.append(f"| {recipe} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the table, and with ``--out`` write it as Markdown and JSON.

    Args:
        options: as of ``nmrun.lab.bench.options.parse``.
        argv: the words that they were read from, for the record.

    Returns:
        The exit status.
    """
    left_out: list[str] = []

    def report(rows: Sequence[Row]) -> None:
        machine = hardware()
        page = "\n\n".join([markdown(rows, machine), *left_out])
        print(page)
        if options.out:
            (options.out / "recipe_overhead.md").write_text(page + "\n")
            record = {"hardware": machine, "rows": [asdict(row) for row in rows]}
            (options.out / "recipe_overhead.json").write_text(json.dumps(record, indent=2) + "\n")

    with output.reported(report) as rows:
        for name in options.models:
            for pattern in options.patterns:
                output.note(f"{name} {pattern}")
                rows += measure(name, pattern, options.recipes, options.rounds, left_out)
                gc.collect()
    if not rows:
        raise ConfigError(left_out)
    return 0
