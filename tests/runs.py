"""Small runs for the tests: configs composed as the command line does, and their files."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from nmrun import recipes
from nmrun.config import schema, source
from nmrun.signals import Signals

RECIPES = tuple(recipes.RECIPES)
# what 12 steps and 8 channels ask for
FITTING = {
    "sdgf_geometric": ("recipe.frames=2",),
    "t_sr_ste": ("recipe.interval=5",),
}
TINY = (
    "sparsity='2:4'",
    "model.channels=[8,8,8]",
    "trainer.batch_size=32",
    "trainer.limit_batches=3",
    "trainer.epochs=4",
    "trainer.threads=1",
    "trainer.device=cpu",
    "trainer.log_every=2",
    "track=local",
)


def config(output_dir: Path | str, *overrides: str) -> schema.Config:
    """The checked config of a run of 12 steps in 4 epochs, with these overrides."""
    source.register()
    tiny = [
        item
        for item in TINY
        if not (
            item.startswith("model.channels") and any(o.startswith("model=") for o in overrides)
        )
    ]
    fitting = [
        item
        for recipe, items in FITTING.items()
        if f"recipe={recipe}" in overrides
        for item in items
    ]
    with initialize_config_module("nmrun.conf", version_base="1.3"):
        return schema.check(
            compose("nmrun", [*tiny, f"output_dir={output_dir}", *fitting, *overrides])
        )


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            key: value
            for key, value in line.items()
            if key not in ("steps_per_second", "items_per_second", "time")
        }
        for line in lines
    ]


def stopping(train: Callable[..., bool], at: int | None) -> Callable[..., bool]:
    """``Loop.train`` with a signal behind step ``at``."""

    def stopped(loop: Any, folder: Path, tracker: Any, signals: Signals) -> bool:
        step = loop.train_step

        def stepped(*where: Any, **how: Any) -> Any:
            found = step(*where, **how)
            if loop.step == at:
                signals.caught = signal.SIGTERM
            return found

        loop.train_step = stepped
        try:
            return train(loop, folder, tracker, signals)
        finally:
            del loop.train_step

    return stopped
