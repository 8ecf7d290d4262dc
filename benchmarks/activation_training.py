"""What packed activations save in the training steps of a GPT on a CPU: steps of two runs in turns,
that are the same but for these products, after some steps of training.

    python benchmarks/activation_training.py [--steps 100] [--rounds 12] [--threads 1] [key=value ...]

Words such as ``model.width=512 trainer.activations=1:4`` go to the config. The other run has oneDNN's
dense products and packed weights where these are faster. One thread: CPU time, more: wall time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from nmrun.lab.bench.harness import Clock, rounds, speedup
from nmrun.lab.bench.options import composed
from nmrun.lab.train import build
from nmrun.lab.train.steps import TrainingSteps

WORDS = (
    *("recipe=dense", "dataset=stdlib_text", "dataset.context=256", "model=gpt2", "model.layers=4"),
    *("model.width=384", "model.heads=6", "model.activation=relu2", "trainer.activations=2:4"),
    *("trainer.batch_size=4", "trainer.device=cpu", "optimizer.lr=1e-3", "trainer.epochs=1000000"),
)


def prepared(folder: Path, words: list[str]) -> tuple[TrainingSteps, Callable[[], object]]:
    """A run that is built, and its next step."""
    config = composed(folder, [*WORDS, *words])
    steps = TrainingSteps(config, build.build(config))
    steps.parts.model.train()

    def step() -> None:
        steps.train_step(
            *divmod(steps.step, steps.parts.task.batches_per_epoch), measure_flips=False
        )
        steps.losses = []

    return steps, step


def zeros(steps: TrainingSteps) -> float:
    """The share of the squared ReLUs' own zeros."""
    with torch.no_grad(), steps.parts.activations.measured() as sums:
        steps.parts.task.loss(steps.parts.model, steps.parts.task.micro_batches(0, 0, 1)[0])
    return steps.parts.activations.shares(sums)["activation_zeros"]


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of training beforehand")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options, words = parser.parse_known_args()
    with TemporaryDirectory() as folder:
        words = [f"trainer.threads={options.threads}", *words]
        # packed: weights alone; twice, which shows how far two arms that are the same differ
        arms = {
            name: prepared(Path(folder), [f"trainer.acceleration={mode}", *words])
            for name, mode in (("auto", "auto"), ("packed", "packed"), ("again", "packed"))
        }
        parts = arms["auto"][0]
        for _, step in arms.values():
            for _ in range(options.steps):
                step()
        found = rounds(
            {name: step for name, (_, step) in arms.items()},
            options.rounds,
            Clock(),
        )
        row = speedup(found["auto"], found["packed"])
        print(
            f"{statistics.median(found['packed']):.0f} ms, packed activations "
            f"{statistics.median(found['auto']):.0f} ms: {row['speedup']:.2f} "
            f"[{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}], n = {options.rounds}; "
            f"{zeros(parts):.0%} zeros; the other run again: "
            f"{speedup(found['again'], found['packed'])['speedup']:.2f}"
        )


if __name__ == "__main__":
    main()
