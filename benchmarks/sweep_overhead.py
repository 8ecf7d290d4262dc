"""What a run of a sweep costs beyond its training: 100 runs of one step each in one process,
tracked locally.

``python benchmarks/sweep_overhead.py [--runs 100] [--out FILE]``. Both are measured as wall time
and as CPU time of the process, the latter of which other processes on the machine hardly change.
Exits with 1 if a run costs ``LIMIT`` CPU seconds or more beyond training and evaluation, on
average.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from nmrun.lab import cli
from nmrun.lab.bench.machine import hardware
from nmrun.lab.train import jobs
from nmrun.lab.train.evaluation import Evaluation
from nmrun.lab.train.loop import Loop

LIMIT = 0.3
SWEEP = (
    *(
        "recipe=step,sr_ste",
        "sparsity=2:4",
        "trainer.epochs=1",
        "trainer.limit_batches=1",
        "trainer.device=cpu",
    ),
    *("trainer.threads=1", "track=local"),
)
Clock = tuple[float, float]


def now() -> Clock:
    return time.perf_counter(), time.process_time()


def sweep(runs: int, folder: str) -> None:
    """The whole command, in this process; raises RuntimeError if it fails."""
    argv, said = sys.argv, io.StringIO()
    sys.argv = ["nmrun", "-m", *SWEEP, f"seed=range({runs // 2})", f"output_dir={folder}"]
    try:
        with contextlib.redirect_stdout(said):
            if cli.main():
                raise RuntimeError(said.getvalue())
    finally:
        sys.argv = argv


def measure(runs: int, folder: str) -> tuple[list[Clock], list[Clock]]:
    """Of each run, the time from the end of the run before it to its own end (the first has what
    the sweep does ahead, the last what it does behind), and how much of that was training: the
    step, and the evaluations."""
    sweep(2, f"{folder}/warm")  # pays for what a process loads once
    ends, training = [], []
    outcome, trained = jobs._outcome, [0.0, 0.0]
    originals = Loop.train_step, Evaluation.evaluate

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = now()
            value = function(*args, **kwargs)
            for clock, (start, end) in enumerate(zip(began, now(), strict=True)):
                trained[clock] += end - start
            return value

        return call

    def one(*args: Any) -> Any:
        trained[:] = [0.0, 0.0]
        value = outcome(*args)
        ends.append(now())
        training.append((trained[0], trained[1]))
        return value

    jobs._outcome = one
    Loop.train_step, Evaluation.evaluate = map(timed, originals)
    ends.append(now())
    try:
        sweep(runs, f"{folder}/measured")
    finally:
        jobs._outcome = outcome
        Loop.train_step, Evaluation.evaluate = originals
    ends[-1] = now()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)], training


def table(whole: Sequence[Clock], training: Sequence[Clock]) -> tuple[str, float]:
    """The figures as Markdown, and the mean overhead in seconds of CPU time."""
    lines = [
        "| seconds a run | wall: median [quartiles], mean | CPU: median [quartiles], mean |",
        "|---|---|---|",
    ]
    beyond = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(whole, training, strict=True)]
    for name, times in (
        ("whole run", whole),
        ("training and evaluation", training),
        ("beyond these", beyond),
    ):
        cells = []
        for clock in range(2):
            some = [time[clock] for time in times]
            q1, middle, q3 = statistics.quantiles(some, n=4, method="inclusive")
            cells.append(f"{middle:.3f} [{q1:.3f}, {q3:.3f}], {statistics.mean(some):.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines), statistics.mean(time[1] for time in beyond)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="default: 100")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the figures there as Markdown"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures, overhead = table(*measure(options.runs, folder))
    machine = hardware()
    load = f"load {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else ""
    head = f"{options.runs} runs of one step in one process: {machine['cpu']}, {machine['cores']} cores, torch {torch.__version__}, {load}."
    print(f"{head}\n\n{figures}")
    if options.out:
        options.out.write_text(f"{head}\n\n{figures}\n")
    return int(overhead >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
