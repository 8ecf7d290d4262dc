"""What was logged while the runs of a table trained: curves over steps, and what happened at which
step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmrun.errors import RunError, tell
from nmrun.lab.report.labels import Key, label
from nmrun.lab.report.tables import Run, Table
from nmrun.lab.runs.run_folder import METRICS, RunFolder

SPEED = "steps_per_second"  # since the row before
SWITCH = re.compile(r"step (\d+): STEP freezes")


@dataclass(frozen=True)
class Curve:
    """Over ``x``, steps, epochs or seconds: mean, standard deviation (zeros for a single run),
    lowest and highest of ``n`` runs.
    """

    x: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int


class History:
    """The files of the finished runs of each cell of a table; each is read once. Runs that lie
    elsewhere (in W&B) have none.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.cells: dict[tuple[Key, Key], list[Run]] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        for run in table.runs.to_dict("records"):
            row, column = (
                tuple(label(run[key]) for key in keys)
                for keys in (table.row_keys, table.column_keys)
            )
            if run["status"] == "finished":
                for shown in table.stands.get((row, column), [column]):
                    self.cells.setdefault((row, shown), []).append(run)

    def logged(self) -> set[str]:
        """The names of all that the runs logged."""
        return {
            key
            for group in self.cells.values()
            for run in group
            for line in self._read(run)
            for key in line
        }

    def curve(self, row: Key, column: Key, key: str, x: str = "step") -> Curve | None:
        """Compute the curve of a logged value in a cell.

        Args:
            row, column: the cell.
            key: what was logged, such as ``train/loss``.
            x: what it is over: ``step``, ``epoch`` or ``seconds``, the time of the training steps.

        Returns:
            The value at the steps at which the run with the fewest of them logged it; None if no
            run of the cell did.
        """
        series = []
        for run in self.cells.get((row, column), ()):
            points = {
                line["step"]: line[key] for line in self._read(run) if line.get(key) is not None
            }
            if points:
                values = np.array(list(points.values()), dtype=float)
                series.append((np.array(list(points)), values, self._over(run, x)))
        if not series:
            return None
        # Seeds log at the same steps, unless trainer.log_every differed
        steps = min((steps for steps, _, _ in series), key=len)
        values = np.stack([np.interp(steps, own, logged) for own, logged, _ in series])
        places = np.mean([over(steps) for _, _, over in series], axis=0)
        sd = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
        return Curve(places, values.mean(0), sd, values.min(0), values.max(0), len(values))

    def switches(self, row: Key, column: Key, x: str = "step") -> list[float]:
        """Find where STEP began to learn masks.

        Args:
            row, column: the cell.
            x: as of :meth:`curve`.

        Returns:
            One place for each run that did, in order.
        """
        found = [
            self._over(run, x)(np.array([int(match[1])])).item()
            for run in self.cells.get((row, column), ())
            for event in result(run).get("events", ())
            if (match := SWITCH.match(event))
        ]
        return sorted(found)

    def last(self, run: Run, x: str = "step") -> float:
        """The last row that the run logged, which is that of its last evaluation."""
        step = max((line["step"] for line in self._read(run)), default=0)
        return float(self._over(run, x)(np.array([step])).item())

    def _over(self, run: Run, x: str) -> Callable[[np.ndarray], np.ndarray]:
        """From steps of a run to what curves are over."""
        lines = self._read(run)
        if x == "step" or not lines:
            return lambda steps: steps
        if x == "epoch":
            epochs, last = (max(line.get(key, 0) for line in lines) for key in ("epoch", "step"))
            return lambda steps: steps * (epochs / max(last, 1))
        timed = [(line["step"], line[SPEED]) for line in lines if line.get(SPEED)]
        known = np.array([0, *(step for step, _ in timed)], dtype=float)
        spent = np.diff(known) / np.array([speed for _, speed in timed], dtype=float)
        passed = np.concatenate([[0.0], np.cumsum(spent)])
        return lambda steps: np.interp(steps, known, passed)

    def _read(self, run: Run) -> list[dict[str, Any]]:
        folder = str(run["folder"])
        if folder not in self._rows:
            self._rows[folder] = rows(folder)
        return self._rows[folder]


def result(run: Run | Mapping[str, Any]) -> dict[str, Any]:
    """The whole ``result.json`` of a run that ``collect`` found; empty where the run lies
    elsewhere.
    """
    return RunFolder(run["folder"]).result


def rows(folder: str) -> list[dict[str, Any]]:
    """What a run logged; of a file that was changed since nothing, with a line that says so."""
    try:
        return [row for row in RunFolder(folder).rows() if "step" in row]
    except RunError as error:
        if (Path(folder) / METRICS).exists():
            tell([f"its rows are left out: {error}"])
        return []
