"""What each of two processes does in test_distributed.py: train one epoch of 12 steps, and be killed
in it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from runs import config

from nmrun.lab import ranks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import checkpoint, runner
from nmrun.lab.train.steps import TrainingSteps


def main(distributed: str, output_dir: str, last: int) -> None:
    """Train with a checkpoint after every second step.

    Args:
        distributed: ``trainer.distributed``.
        output_dir: of the run.
        last: the step after which both processes are killed; 0: none.
    """
    overrides = ("recipe=step", "recipe.switch=0.4", "trainer.epochs=1", "trainer.limit_batches=12")
    cfg = config(output_dir, *overrides, f"trainer.distributed={distributed}")
    step, asked = TrainingSteps.train_step, 0

    def stepped(loop: TrainingSteps, *args: Any, **kwargs: Any) -> Any:
        result = step(loop, *args, **kwargs)
        if loop.step == last:
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
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
