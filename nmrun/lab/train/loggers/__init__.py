"""Where metrics go beside ``metrics.jsonl``: a module for each, with ``begin``.

``begin(run)`` returns the logger, with ``log(row)`` and ``finish(summary, exit_code)``, or None
where there is nothing to log to. Whatever any of them raises costs a line and never the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nmrun.patterns import written

MODULES = {
    "wandb": ("W&B", "nmrun.lab.train.loggers.weights_and_biases"),
    "tensorboard": ("TensorBoard", "nmrun.lab.train.loggers.tensorboard"),
    "mlflow": ("MLflow", "nmrun.lab.train.loggers.mlflow"),
}


class Logger(Protocol):
    """What gets the metrics of one run."""

    def log(self, row: dict[str, Any]) -> None:
        """Log a row of ``metrics.jsonl``."""

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """The run has ended; ``summary`` is flat: metrics by name, status, seconds."""


@dataclass(frozen=True)
class Run:
    """A run as a logger needs to know it.

    Attributes:
        folder: the run's folder.
        config: the whole config as plain data.
        id: ten hexadecimal digits.
        sweep: the name of the sweep that the run belongs to, or None.
        history: the rows that a resumed run had logged before.
        say: leaves a line for the reader.
    """

    folder: Path
    config: dict[str, Any]
    id: str
    sweep: str | None
    history: list[dict[str, Any]]
    say: Callable[[str], None]

    @property
    def ratio(self) -> str:
        """``2:4``, or ``dense``."""
        return written(self.config["sparsity"])

    @property
    def name(self) -> str:
        """What a reader tells runs apart by: ``step 2:8 digits small_conv s0``."""
        names = (self.config[group]["name"] for group in ("dataset", "model"))
        what = "dense" if self.ratio == "dense" else f"{self.config['recipe']['name']} {self.ratio}"
        return f"{what} {' '.join(names)} s{self.config['seed']}"

    @property
    def tags(self) -> list[str]:
        """Recipe, ratio, data set, model, and those of ``track.tags``."""
        names = (self.config[group]["name"] for group in ("recipe", "dataset", "model"))
        return list(dict.fromkeys([*names, self.ratio, *self.config["track"]["tags"]]))
