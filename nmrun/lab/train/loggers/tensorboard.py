"""TensorBoard: event files in the run's folder, which ``tensorboard --logdir outputs`` finds."""

from __future__ import annotations

import json
import shutil
from typing import Any

from nmrun.lab.train.loggers import Run

FOLDER = "tensorboard"


class TensorBoard:
    """A writer of event files."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, row: dict[str, Any]) -> None:
        """Write the numbers of a row at its step and time."""
        for key, value in row.items():
            if key not in ("step", "time") and isinstance(value, int | float):
                self._writer.add_scalar(key, value, row["step"], row.get("time"))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Write the summary as a text, and close the files."""
        self._writer.add_text("summary", _block(summary))
        self._writer.close()


def begin(run: Run) -> TensorBoard:
    """Begin event files anew, with the whole history of a resumed run."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    begun = TensorBoard(SummaryWriter(str(folder)))
    begun._writer.add_text("config", _block(run.config))
    for row in run.history:
        begun.log(row)
    return begun


def _block(plain: dict[str, Any]) -> str:
    """Plain data as a block of Markdown."""
    return "".join(f"    {line}\n" for line in json.dumps(plain, indent=2).splitlines())
