"""The figures that a run shows while it trains, from what it logs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from nmrun import ranges
from nmrun.lab.train.console import Fact, Status
from nmrun.lab.train.steps import Steps


class Progress:
    """What is shown of a run. ``row`` has the last value of everything that was logged."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.row: dict[str, float] = {}
        self._began, self._begun = time.perf_counter(), steps.step
        self._sum: Tensor | float = 0.0
        self._count = 0
        self._widths: dict[str, int] = {}  # of the figures in the lines of epochs so far

    def begin(self) -> None:
        """A sitting begins."""
        self._began, self._begun = time.perf_counter(), self.steps.step

    def step(self, loss: Tensor) -> None:
        """A step is made; its loss may be on the device, where it stays."""
        self._sum, self._count = self._sum + loss, self._count + 1

    def status(self) -> Status:
        """How far the run is now."""
        steps, elapsed = self.steps, time.perf_counter() - self._began
        done, total = steps.step - self._begun, steps.total_steps
        left = elapsed / done * (total - steps.step) if done else None
        shown = [*facts(self.row, steps.task.metric), *_memory(steps.device)]
        return Status(steps.step, total, self._epoch(), self._phase(), shown, elapsed, left)

    def epoch(self, best: bool = False) -> str:
        """The line of an evaluation, with the mean loss since the one before. Columns keep their
        places from line to line. ``best``: none before was as good.
        """
        row = self.row
        if self._count:
            row = row | {"train/loss": float(self._sum) / self._count}
        self._sum, self._count = 0.0, 0
        kept = ("train/loss", f"eval/{self.steps.task.metric}", "steps_per_second")
        cells = [f"epoch {self._epoch()}"]
        if ranges.steps(self.steps.trainer.eval_every):  # several lines of one epoch
            total = str(self.steps.total_steps)
            cells.append(f"step {self.steps.step:{len(total)}}/{total}")
        cells += [f"{self._phase():6}"] if self.steps.handle.sparse else []
        shown = facts({key: row[key] for key in kept if key in row}, self.steps.task.metric)
        for what, figure in shown:
            width = self._widths[what] = max(self._widths.get(what, 0), len(figure))
            cells.append(f"{what} {figure:>{width}}" if what else f"{figure:>{width}}")
        return "  ".join([*cells, *["best"] * best])

    def _epoch(self) -> str:
        batches = self.steps.task.batches_per_epoch
        epochs = -(-self.steps.total_steps // batches)
        return f"{max(-(-self.steps.step // batches), 1):{len(str(epochs))}}/{epochs}"

    def _phase(self) -> str:
        return self.steps.handle.phase if self.steps.handle.sparse else ""


def facts(row: Mapping[str, float], metric: str) -> list[Fact]:
    """The figures of a row, as far as it has them, in words.

    Args:
        row: by the names of ``metrics.jsonl``.
        metric: that of the task, such as ``accuracy``.
    """
    shown = [
        ("train loss", "train/loss", ".4f"),
        (f"val {metric}", f"eval/{metric}", ".4f"),
        ("val loss", "eval/loss", ".4f"),
        ("lr", "lr", ".2e"),
    ]
    found: dict[str, str] = {
        word: f"{row[key]:{form}}" for word, key, form in shown if row.get(key) is not None
    }
    speed = row.get("steps_per_second")
    rates = [] if not speed else [("", _speed(speed))]
    if items := row.get("items_per_second"):
        rates.append(("", f"{_short(items)} items/s"))
    return [*found.items(), *rates]


def _speed(steps: float) -> str:
    """Steps a second, or seconds a step where that is slower than one."""
    if steps < 1:
        return f"{1 / steps:.3g} s/step"
    return f"{steps:.0f} steps/s" if steps >= 10 else f"{steps:.1f} steps/s"


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def _memory(device: torch.device) -> list[Fact]:
    """The most memory so far: the GPU's that torch had, or this process's where that is known."""
    if device.type == "cuda":
        return [("", f"{torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB GPU")]
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return [("", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB")]
    return []
