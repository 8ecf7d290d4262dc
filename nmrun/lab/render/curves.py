"""What runs logged while they trained, as curves: one panel a column of the table, one line a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun.errors import RunError, tell
from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import Key, scale
from nmrun.lab.compare.tables import Run, Table, by_place
from nmrun.lab.render.style import (
    FEW,
    SWITCHES,
    Layout,
    heading,
    look,
    named,
    of_number,
    panels,
    title,
    x_label,
)
from nmrun.lab.runs.run_folder import METRICS, RunFolder, RunFolders

MARKS = 7  # markers on a curve
DOTS: dict[str, Any] = {"linestyle": (0, (1, 1.5)), "zorder": 0}
OVER = {"step": "training step", "epoch": "epoch", "seconds": "seconds of training steps"}
SPEED = "steps_per_second"  # counted since the row before


# --- what was logged ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Mean and deviation (zeros for a single run) of ``n`` runs, over ``x``, as they are shown."""

    x: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    n: int


class History:
    """The files of the runs that a cell shows, each read once. Runs of a CSV file have none."""

    def __init__(self, table: Table, folders: RunFolders | None = None) -> None:
        self.table, self.folders = table, RunFolders() if folders is None else folders
        self.cells: dict[tuple[Key, Key], list[Run]] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        finished = (run for run in table.records if run["status"] == "finished")
        for place, runs in by_place(finished, table.row_keys, table.column_keys).items():
            row, column = place
            for shown in table.stands.get(place, [column]):
                cell = table.cells.get((row, shown))  # none where metrics are rows or columns
                failed = cell.failed if cell else ()
                self.cells[row, shown] = [run for run in runs if run["seed"] not in failed]

    def curve(self, row: Key, column: Key, key: str, x: str = "step") -> Curve | None:
        """A logged value in a cell, over ``step``, ``epoch`` or ``seconds`` (of training steps);
        None if no run logged it. Its steps are those of the run that logged it least often.
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
        values = np.stack([np.interp(steps, own_steps, logged) for own_steps, logged, _ in series])
        places = np.mean([over(steps) for _, _, over in series], axis=0)
        sd = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
        unit = scale(key)
        return Curve(places, unit * values.mean(0), unit * sd, len(values))

    def switches(self, row: Key, column: Key, x: str = "step") -> list[float]:
        """Where STEP began to learn masks in the runs of a cell, each place once."""
        places = {
            self._over(run, x)(np.array([event["step"]])).item()
            for run in self.cells.get((row, column), ())
            for event in self.folders[run["folder"]].result.get("events", ())
            if event.get("kind") == "switch"
        }
        return sorted(places)

    def _over(self, run: Run, x: str) -> Callable[[np.ndarray], np.ndarray]:
        """A function from a run's steps to the x axis of its curves."""
        lines = self._read(run)
        if x == "step" or not lines:
            return lambda steps: steps
        if x == "epoch":
            epochs, last = (max(line.get(key, 0) for line in lines) for key in ("epoch", "step"))
            return lambda steps: steps * (epochs / max(last, 1))
        timed = [(line["step"], line[SPEED]) for line in lines if line.get(SPEED)]
        knots = np.array([0, *(step for step, _ in timed)], dtype=float)
        spent = np.diff(knots) / np.array([speed for _, speed in timed], dtype=float)
        passed = np.concatenate([[0.0], np.cumsum(spent)])
        return lambda steps: np.interp(steps, knots, passed)

    def _read(self, run: Run) -> list[dict[str, Any]]:
        folder = str(run["folder"])
        if folder not in self._rows:
            self._rows[folder] = rows(self.folders[folder])
        return self._rows[folder]


def rows(run: RunFolder) -> list[dict[str, Any]]:
    """The rows that a run logged. For a file that was changed since, none, and a warning."""
    try:
        return [row for row in run.rows() if "step" in row]
    except RunError as error:
        if (run.path / METRICS).exists():
            tell([f"its rows are left out: {error}"])
        return []


# --- drawn ----------------------------------------------------------------------------------------


def curves(history: History, metric: str, layout: Layout) -> Figure | None:
    """A logged metric over training: mean, and a band of one standard deviation over seeds. A panel
    a column with a line a row; of many rows, a panel a row with a line a column. Vertical lines are
    STEP's switches. None where no run logged it at two steps or more.
    """
    table = history.table
    every = {place: history.curve(*place, metric, layout.x) for place in table.cells}
    found = {place: curve for place, curve in every.items() if curve is not None}
    if all(len(curve.x) == 1 for curve in found.values()):
        return None
    rows = [row for row in table.rows if any(row == r for r, _ in found)]
    columns = [column for column in table.columns if any(column == c for _, c in found)]
    of_rows = {row: named(table, row) for row in rows}
    of_columns = {c: ", ".join(notation.column(table.column_keys, c)) for c in columns}
    turned = len(rows) > FEW
    figure, panel = panels([*(of_rows if turned else of_columns).values()], layout)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if (row, column) not in found:
                continue
            curve = found[row, column]
            place, name = (i, of_columns[column]) if turned else (j, of_rows[row])
            how = of_number(j) if turned else look(table, row)
            without = len(history.cells[row, column]) - curve.n
            name += f" ({without} without a log)" if without else ""
            _line(panel[place], curve, how, name)
            for x in history.switches(row, column, layout.x):
                panel[place].axvline(x, label=SWITCHES, color=how["color"], **DOTS)
    if layout.ylim:
        panel[0].set_ylim(layout.ylim)
    elif scale(metric) == 100.0:
        # the beginning of training is of no interest: the axis fits the curves after a tenth of it
        ends = [float(c.mean[c.x >= 0.1 * c.x[-1]].min()) for c in found.values()]
        panel[0].set_ylim(bottom=max(0.0, min(ends) - 2.0))
    x_label(figure, OVER[layout.x])
    figure.supylabel(notation.metric(metric), fontsize="medium")
    title(figure, heading(table), layout)
    return figure


def _line(axes: Axes, curve: Curve, how: dict[str, Any], name: str) -> None:
    """Draw the mean with a band; markers are few, and at other places on each line."""
    every = max(1, len(curve.x) // MARKS)
    marks = (len(axes.lines) % every, every)
    axes.plot(curve.x, curve.mean, label=name, markevery=marks, **how)
    if curve.n > 1:
        low, high = curve.mean - curve.sd, curve.mean + curve.sd
        axes.fill_between(curve.x, low, high, color=how["color"], alpha=0.15, linewidth=0)
