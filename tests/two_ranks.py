"""What each of two processes does in test_distributed.py: train every recipe and compare notes, or be
killed within an epoch.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from played_gpu import play
from runs import RECIPES, config
from safetensors import safe_open

from nmrun.lab import ranks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import checkpoint, runner
from nmrun.lab.train.loop import Loop
from nmrun.lab.train.steps import TrainingSteps

OPTIONS = ("trainer.accumulate=2", "trainer.clip=1.0", "model.exclude=[stem,head]")
SWITCH = {"step": ("recipe.switch=0.5",), "asp": ("recipe.prune_at=0.5",)}
ACCELERATED = (
    "model=mlp",
    "model.hidden=[32,32,32]",
    "trainer.precision=bf16",
    "trainer.acceleration=force",
)


def run(output_dir: str, recipe: str, *overrides: str) -> str:
    """Train in this process, one of several or not; returns the run's folder."""
    cfg = config(output_dir, f"recipe={recipe}", *OPTIONS, *SWITCH.get(recipe, ()), *overrides)
    result = runner.run(cfg, run_folder(cfg))
    assert result["status"] == "finished", result
    return result["folder"]


def train(output_dir: str) -> None:
    """Every recipe in turn; fails where the ranks do not end with the same bits."""
    digests: list[str] = []
    whole = Loop.train

    def watched(loop: Loop, *args: object) -> bool:
        done = whole(loop, *args)
        state = b"".join(value.numpy().tobytes() for value in loop.model.state_dict().values())
        digests.append(hashlib.sha256(state).hexdigest())
        return done

    Loop.train = watched
    for words in (*((recipe,) for recipe in RECIPES), ("ste", *ACCELERATED)):
        if words[1:]:
            play(setattr, Path(output_dir))
        folder = run(output_dir, *words)
        one, other = ranks.gathered(digests[-1])
        assert one == other, words
        if ranks.leads():
            with safe_open(f"{folder}/model.safetensors", "pt") as file:
                assert file.keys()


def killed(output_dir: str, distributed: str, last: str) -> None:
    """Train one epoch of 12 steps, with a checkpoint after every second one. ``last``: the step after
    which both processes are killed; 0: none."""
    overrides = ("recipe=step", "recipe.switch=0.4", "trainer.epochs=1", "trainer.limit_batches=12")
    cfg = config(output_dir, *overrides, f"trainer.distributed={distributed}")
    step, asked = TrainingSteps.train_step, 0

    def stepped(loop: TrainingSteps, *args: Any, **kwargs: Any) -> Any:
        result = step(loop, *args, **kwargs)
        if loop.step == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def due(_: checkpoint.CheckpointClock) -> bool:
        nonlocal asked
        asked += 1
        return ranks.rank() == 1 or asked % 2 == 0

    TrainingSteps.train_step = stepped
    checkpoint.CheckpointClock.due = due
    result = runner.run(cfg, run_folder(cfg))
    assert result["status"] == "finished", result


if __name__ == "__main__":
    {"train": train, "killed": killed}[sys.argv[1]](*sys.argv[2:])
