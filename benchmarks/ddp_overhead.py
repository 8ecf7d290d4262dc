"""What a recipe adds to a training step in two processes (DDP, Gloo) and in one: CPU milliseconds
over the dense step of the same round.

``python benchmarks/ddp_overhead.py [--rounds 30] [--out FILE]`` measures both. CPU time of the
process, since each of two processes has to wait for the other, and its wall time is the slower
one's of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from nmrun import ranks
from nmrun.lab.bench.arms import ARMS, WORKLOADS
from nmrun.lab.bench.machine import hardware
from nmrun.lab.bench.recipes import Arm
from nmrun.patterns import Pattern

RECIPES = ("dense_again", "ste", "sr_ste", "step_phase_two", "s_ste")
WARM_UP, STEPS = 3, 5


class Shared(Arm):
    """An arm whose gradients are averaged over the processes, if there are several."""

    def __init__(self, recipe: str) -> None:
        self.workload = WORKLOADS["small_conv"]
        torch.manual_seed(0)
        super().__init__(
            self.workload.build().train(), ARMS[recipe], Pattern(2, 4), self.workload.exclude
        )
        self.forward = ranks.parallel(self.model) if ranks.world() > 1 else self.model
        self.batch = torch.randn(64 // ranks.world(), *self.workload.shape[1:])

    def milliseconds(self) -> float:
        """CPU time of a step, over ``STEPS`` steps."""
        began = time.process_time()
        for _ in range(STEPS):
            self.forward(self.batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return 1e3 * (time.process_time() - began) / STEPS


def measure(rounds: int) -> dict[str, list[float]]:
    """In this process: the milliseconds that each recipe adds, round by round; ``dense`` is the
    dense step itself.
    """
    ranks.begin("cpu")
    torch.set_num_threads(1)
    arms = {"dense": Shared("dense_again"), **{recipe: Shared(recipe) for recipe in RECIPES}}
    order = random.Random(0)
    added: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(WARM_UP + rounds):
        times = {name: arms[name].milliseconds() for name in order.sample(list(arms), len(arms))}
        if number >= WARM_UP:
            for name, value in times.items():
                added[name].append(value if name == "dense" else value - times["dense"])
    return added


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="default: 30")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the figures there as Markdown"
    )
    options = parser.parse_args()
    if "RANK" in os.environ:  # one of the two
        added = measure(options.rounds)
        if ranks.leads():
            print(json.dumps(added))
        return 0
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
    ]
    done = subprocess.run(
        [*torchrun, f"--rounds={options.rounds}"], stdout=subprocess.PIPE, text=True, check=True
    )
    two, one = json.loads(done.stdout.splitlines()[-1]), measure(options.rounds)
    machine = hardware()
    lines = [
        f"CPU milliseconds a step, median [quartiles] of {options.rounds} rounds, 64 images a step in all, 2:4, small_conv, AdamW: "
        f"{machine['cpu']}, {machine['cores']} cores, torch {torch.__version__}.",
        "",
        "| | one process | each of two |",
        "|---|---|---|",
    ]
    for name in one:
        cells = [statistics.quantiles(times[name], n=4, method="inclusive") for times in (one, two)]
        title = "dense step" if name == "dense" else f"{name} adds"
        lines.append(
            f"| {title} | "
            + " | ".join(f"{middle:.2f} [{q1:.2f}, {q3:.2f}]" for q1, middle, q3 in cells)
            + " |"
        )
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
