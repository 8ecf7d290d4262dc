"""How far a run is, by its ``metrics.jsonl``, also while another process writes it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmrun.lab.runs import jsonl
from nmrun.lab.runs.run_folder import METRICS


@dataclass(frozen=True)
class Position:
    """As of the last rows. Texts are empty, and numbers None, where they do not say.

    Attributes:
        step: the last one.
        epoch: ``3/12``; ``3`` where the config does not say how many there are; empty where
            steps are counted (``trainer.steps``).
        steps: ``40/100`` likewise.
        phase: ``dense`` or ``sparse`` at the last evaluation; empty in a run without sparse weights.
        validation: the metric of the last evaluation: ``accuracy 0.9312``.
        left: seconds to the end of the training.
    """

    step: int
    epoch: str
    steps: str
    phase: str
    validation: str
    left: float | None


def of(folder: Path, trainer: Mapping[str, Any]) -> Position | None:
    """Where the run in a folder is.

    Args:
        trainer: the config's group, as far as it is known.

    Returns:
        None before the first row.
    """
    rows = jsonl.newest_first(folder / METRICS)
    last = next((row for row in rows if type(row.get("step")) is int), None)
    if last is None:
        return None
    epochs, total, step, epoch = trainer.get("epochs"), trainer.get("steps"), *_place(last)
    by_steps = type(total) is int
    known = type(epochs) is int and not trainer.get("budget")
    of_epochs = f"/{epochs}" if known else ""
    phase = validation = ""
    for row in itertools.chain([last], rows):
        names = [key for key in row if key.startswith("eval/") and type(row[key]) in (int, float)]
        if not names:
            continue
        name = next((key for key in names if key != "eval/loss"), names[0])
        validation = f"{name.removeprefix('eval/')} {row[name]:.4f}"
        if "sparsity/density" in row:
            phase = "dense" if row["sparsity/density"] == 1 else "sparse"
        done, at = _place(row)
        # evaluations by epochs are at an epoch's end, which says how many steps it has
        if of_epochs and not by_steps and at and type(trainer.get("eval_every")) is int:
            total = int(trainer["epochs"]) * done // at
        break
    speed, left = last.get("steps_per_second"), None
    if isinstance(total, int) and isinstance(speed, int | float) and speed > 0:
        left = max(total - step, 0) / speed
    return Position(
        step,
        "" if by_steps or not epoch else f"{epoch}{of_epochs}",
        f"{step}/{total}" if by_steps else str(step),
        *(phase, validation, left),
    )


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    """The step and the epoch of a row; 0 where it does not say."""
    step, epoch = (row.get(key) for key in ("step", "epoch"))
    return (step if type(step) is int else 0), (epoch if type(epoch) is int else 0)
