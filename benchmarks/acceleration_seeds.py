"""Whether accelerated training ends where training with masks alone does: the same runs with
``trainer.acceleration=off`` and ``force``, seed by seed.

``python benchmarks/acceleration_seeds.py [--seeds 5] [--sparsity 2:4] [--out FOLDER]``, with tiny
Shakespeare in NMRUN_DATA. Products differ by rounding alone, so the arms drift apart as two runs
with other roundings do, and must not end apart by more than seeds do. Exits with 1 if the interval
of the paired differences leaves out zero, or one of them exceeds the range of the seeds.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import nmrun
from nmrun.lab.bench.harness import hardware
from nmrun.lab.compare.statistics import moderated, paired, summarise
from nmrun.lab.render.formats import aligned

WORDS = (
    *("dataset=shakespeare", "dataset.context=64", "model=gpt_tiny", "model.width=256"),
    *("optimizer=adamw", "optimizer.lr=1e-3", "schedule=cosine", "schedule.warmup=0.05"),
    *("trainer.batch_size=8", "trainer.epochs=4", "trainer.limit_batches=40", "trainer.clip=1"),
    *("trainer.limit_evaluation=100", "trainer.device=cpu", "trainer.threads=1", "track=local"),
)
ARMS = ("off", "force")
METRIC = "test/loss"


def train(words: list[str], arm: str, seed: int, folder: str) -> nmrun.Result:
    own = [f"trainer.acceleration={arm}", f"seed={seed}", f"output_dir={folder}/{arm}"]
    return nmrun.run([*WORDS, *words, *own])


def report(final: dict[str, list[float]], said: str) -> tuple[str, bool]:
    """The figures as Markdown, and whether the arms end alike."""
    gaps = [b - a for a, b in zip(final["off"], final["force"], strict=True)]
    rows = [
        [str(seed), f"{off:.4f}", f"{force:.4f}", f"{gap:+.4f}"]
        for seed, (off, force, gap) in enumerate(zip(*final.values(), gaps, strict=True))
    ]
    gap = paired(summarise(final["force"]), summarise(final["off"]), 0.0)
    assert gap is not None
    found = moderated({"": gap})[""]
    if found.low is None or found.high is None:
        raise SystemExit("nothing is known of the spread: --seeds 2 or more that are not alike")
    spread, reach = statistics.stdev(final["off"]), max(final["off"]) - min(final["off"])
    alike = bool(found.low <= 0 <= found.high) and max(map(abs, gaps)) <= reach
    verdict = (
        f"Difference {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] (mean, 95 % interval of the paired t), "
        f"at most {max(map(abs, gaps)):.4f} at one seed. Seeds of `off`: standard deviation {spread:.4f}, range {reach:.4f}. "
        f"**{'Within the spread of the seeds' if alike else 'Outside of the spread of the seeds'}**, n = {len(gaps)}."
    )
    head = ["seed", "masks alone (`off`)", "packed (`force`)", "difference"]
    return f"{said}\n\n{aligned(head, rows)}\n\n{verdict}", alike


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--sparsity", default="2:4", metavar="N:M", help="default: 2:4")
    parser.add_argument("--recipe", default="sr_ste", help="default: sr_ste")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="CSV of all losses, Markdown")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all runs")
    options = parser.parse_args()
    words = [f"recipe={options.recipe}", f"sparsity={options.sparsity}", *options.overrides]
    final: dict[str, list[float]] = {arm: [] for arm in ARMS}
    curves: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for arm in ARMS:
                result = train(words, arm, seed, folder)
                final[arm].append(float(result.metrics[METRIC] or "nan"))
                history = result.history()
                for name in ("train/loss", "eval/loss"):
                    some = history[["step", name]].dropna().itertuples(index=False)
                    curves += [(arm, seed, name, int(step), f"{loss:.6f}") for step, loss in some]
                curves.append((arm, seed, METRIC, "", f"{final[arm][-1]:.6f}"))
    machine = hardware()
    said = (
        f"{METRIC} in nats a character after training a GPT on tiny Shakespeare ({options.recipe}, {options.sparsity}): the same runs with "
        "`trainer.acceleration=off` and `force`."
    )
    text, alike = report(final, said)
    text += (
        f"\n\n{machine['cpu']}, 1 thread, torch {torch.__version__}\n\n"
        f"    python benchmarks/acceleration_seeds.py {' '.join(sys.argv[1:])}\n\n"
        f"All runs: `{' '.join(WORDS)}`\n"
    )
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "acceleration_seeds.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("acceleration", "seed", "metric", "step", "loss"), *curves]
            )
        (options.out / "acceleration_seeds.md").write_text(text)
    return int(not alike)


if __name__ == "__main__":
    sys.exit(main())
