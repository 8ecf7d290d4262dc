"""What was logged while the runs of a table trained: curves over steps, and what happened at which
step.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nmrun.files import jsonl
from nmrun.report.tables import Key, Run, Table, label

SWITCH = re.compile(r"step (\d+): STEP freezes")


@dataclass(frozen=True)
class Curve:
    """Over ``steps``: mean, standard deviation (zeros for a single run), lowest and highest of
    ``n`` runs.
    """

    steps: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int


class History:
    """The files of the finished runs of each cell of a table; each is read once.

    Args:
        table: the table.
        runs: its runs. Those that lie elsewhere (in W&B) have no files.
    """

    def __init__(self, table: Table, runs: pd.DataFrame) -> None:
        self.table = table
        self.cells: dict[tuple[Key, Key], list[Run]] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        for run in runs.to_dict("records"):
            row, column = (
                tuple(label(run[key]) for key in keys)
                for keys in (table.row_keys, table.column_keys)
            )
            if run["status"] == "finished":
                for place in (
                    [(row, c) for c in table.columns]
                    if row in table.references
                    else [(row, column)]
                ):
                    self.cells.setdefault(place, []).append(run)

    def logged(self) -> set[str]:
        """The names of all that the runs logged."""
        return {
            key
            for group in self.cells.values()
            for run in group
            for line in self._read(run)
            for key in line
        }

    def curve(self, row: Key, column: Key, key: str) -> Curve | None:
        """Compute the curve of a logged value in a cell.

        Args:
            row, column: the cell.
            key: what was logged, such as ``train/loss``.

        Returns:
            The value over the steps at which the run with the fewest of them logged it; None if no
            run of the cell did.
        """
        series = []
        for run in self.cells.get((row, column), ()):
            points = {
                line["step"]: line[key] for line in self._read(run) if line.get(key) is not None
            }
            if points:
                series.append(
                    (np.array(list(points)), np.array(list(points.values()), dtype=float))
                )
        if not series:
            return None
        # Seeds log at the same steps, unless trainer.log_every differed
        steps = min((steps for steps, _ in series), key=len)
        values = np.stack([np.interp(steps, *one) for one in series])
        sd = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
        return Curve(steps, values.mean(0), sd, values.min(0), values.max(0), len(values))

    def switches(self, row: Key, column: Key) -> list[int]:
        """Find the steps at which STEP began to learn masks.

        Args:
            row, column: the cell.

        Returns:
            One step for each run that did, in order.
        """
        found = [
            SWITCH.match(event)
            for run in self.cells.get((row, column), ())
            for event in result(run).get("events", ())
        ]
        return sorted(int(match[1]) for match in found if match)

    def last_step(self, run: Run) -> int:
        """The step of the last row that the run logged, which is that of its last evaluation."""
        return int(max((line["step"] for line in self._read(run)), default=0))

    def _read(self, run: Run) -> list[dict[str, Any]]:
        folder = str(run["folder"])
        if folder not in self._rows:
            self._rows[folder] = _lines(Path(folder, "metrics.jsonl"))
        return self._rows[folder]


def result(run: Run | Mapping[str, Any]) -> dict[str, Any]:
    """The whole ``result.json`` of a run that ``collect`` found; empty where the run lies
    elsewhere.
    """
    try:
        whole: dict[str, Any] = json.loads(
            Path(run["folder"], "result.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return {}
    return whole


def _lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl`` that are whole."""
    with contextlib.suppress(OSError):
        return [row for row in jsonl.read(file)[0] if "step" in row]
    return []
