"""What runs logged while they trained, as curves: one panel a column of the table, one line a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun.errors import RunError, tell
from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import Key, label, scale
from nmrun.lab.compare.tables import Run, Table
from nmrun.lab.runs.run_folder import METRICS, RunFolder
from nmrun.lab.show.style import (
    GREY,
    MARK,
    Layout,
    look,
    of_number,
    panel_name,
    panels,
    title,
    x_label,
)
from nmrun.lab.show.style import (
    label as named,
)

FLIPS, SAMPLE, WINDOW = "sparsity/flip_rate", "step/variance_change", "step/variance_change_window"
MARKS = 7  # markers on a curve
FEW = 7  # lines that one panel shows well
SWITCHES = "STEP's switch"
OVER = {"step": "training step", "epoch": "epoch", "seconds": "seconds of training steps"}
SPEED = "steps_per_second"  # since the row before


# --- what was logged ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Mean, deviation (zeros for a single run), lowest and highest of ``n`` runs, over ``x``."""

    x: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int


class History:
    """The files of the finished runs of each cell, each read once. Runs in W&B have none."""

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
                for target in table.stands.get((row, column), [column]):
                    self.cells.setdefault((row, target), []).append(run)

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
        return Curve(places, values.mean(0), sd, values.min(0), values.max(0), len(values))

    def switches(self, row: Key, column: Key, x: str = "step") -> list[float]:
        """Where STEP began to learn masks: a place for each run that did, in order."""
        places = [
            self._over(run, x)(np.array([event["step"]])).item()
            for run in self.cells.get((row, column), ())
            for event in RunFolder(run["folder"]).result.get("events", ())
            if event.get("kind") == "switch"
        ]
        return sorted(places)

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
        knots = np.array([0, *(step for step, _ in timed)], dtype=float)
        spent = np.diff(knots) / np.array([speed for _, speed in timed], dtype=float)
        passed = np.concatenate([[0.0], np.cumsum(spent)])
        return lambda steps: np.interp(steps, knots, passed)

    def _read(self, run: Run) -> list[dict[str, Any]]:
        folder = str(run["folder"])
        if folder not in self._rows:
            self._rows[folder] = rows(folder)
        return self._rows[folder]


def rows(folder: str) -> list[dict[str, Any]]:
    """What a run logged; of a file that was changed since nothing, with a line that says so."""
    try:
        return [row for row in RunFolder(folder).rows() if "step" in row]
    except RunError as error:
        if (Path(folder) / METRICS).exists():
            tell([f"its rows are left out: {error}"])
        return []


# --- drawn ----------------------------------------------------------------------------------------


def curves(table: Table, history: History, metric: str, layout: Layout) -> Figure | None:
    """A logged metric over training: mean, and a band of one standard deviation over seeds.
    Vertical lines are STEP's switches. None where no run logged it at two steps or more.
    """
    panelled = _over_training(table, history, metric, scale(metric), layout)
    if panelled is None:
        return None
    figure, every, lines = panelled
    low = min(float(curve.mean[curve.x >= 0.1 * curve.x[-1]].min()) for curve in lines)
    # where training begins is of no interest: the axis begins where the curves are after a tenth
    if scale(metric) == 100.0 and not layout.ylim:
        every[0].set_ylim(bottom=max(0.0, 100.0 * low - 2.0))
    return _add_labels(figure, every, table, notation.metric(metric), layout)


def flips(table: Table, history: History, layout: Layout) -> Figure | None:
    """The flip rate over training, in percent of the mask entries; None where no run logged it."""
    panelled = _over_training(table, history, FLIPS, 100.0, layout)
    if panelled is None:
        return None
    figure, every, _ = panelled
    axes = every[0]
    # masks that change all at once, now and then, beside ones that change bit by bit: linear up to
    # 1 %
    if axes.get_ylim()[1] > 5.0:
        axes.set_yscale("symlog", linthresh=1.0, linscale=1.5)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0.0)
    return _add_labels(figure, every, table, "flip rate (% of the mask)", layout)


def autoswitch(table: Table, history: History, layout: Layout) -> Figure | None:
    """The samples of AutoSwitch, the mean of its window and the threshold (if it is Adam's eps).
    The window may decide in what is shaded (t_min to t_max). None where no run logged samples.
    """
    rows, columns = _with(table, history, WINDOW)
    if not columns:
        return None
    figure, every = panels([panel_name(table, column, layout) for column in columns], layout)
    for axes, column in zip(every, columns, strict=True):
        for row in rows:
            sample, window = (history.curve(row, column, key, layout.x) for key in (SAMPLE, WINDOW))
            if sample is None or window is None:
                continue
            how, name = look(table, row), named(table, row, layout)
            axes.plot(
                sample.x, sample.mean, color=how["color"], linewidth=0.8, alpha=0.6,
                label=f"{name}: sample",
            )  # fmt: skip
            _line(axes, window, how, f"{name}: mean of the window", window.low, window.high)
            _mark(axes, history.switches(row, column, layout.x), how["color"])
            run = history.cells[row, column][0]
            first, last = (
                run[f"recipe.{key}"] * history.last(run, layout.x) for key in ("t_min", "t_max")
            )
            axes.axvspan(first, last, color=GREY, alpha=0.12, linewidth=0, label="t_min to t_max")
            if pd.isna(run.get("recipe.threshold")):  # a relative one is no constant
                axes.axhline(
                    run["optimizer.eps"], color=GREY, linestyle="--", label="threshold, Adam's eps"
                )
        axes.set_yscale("log")
    what = "mean change of the second moment\n(band: range over seeds)"
    return _add_labels(figure, every, table, what, layout)


def _over_training(
    table: Table, history: History, key: str, unit: float, layout: Layout
) -> tuple[Figure, list[Axes], list[Curve]] | None:
    """A panel a column with a line a row; of many rows, a panel a row with a line a column."""
    rows, columns = _with(table, history, key)
    if not columns:
        return None
    if turned := len(rows) > FEW:
        figure, every = panels([named(table, row, layout) for row in rows], layout)
    else:
        figure, every = panels([panel_name(table, c, layout) for c in columns], layout)
    lines = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            curve = history.curve(row, column, key, layout.x)
            if curve is None:
                continue
            axes = every[i if turned else j]
            how = of_number(j) if turned else look(table, row)
            name = panel_name(table, column, layout) if turned else named(table, row, layout)
            without = len(history.cells[row, column]) - curve.n
            name += f" ({without} without a log)" if without else ""
            mean, sd = unit * curve.mean, unit * curve.sd
            scaled = Curve(curve.x, mean, sd, mean, mean, curve.n)
            _line(axes, scaled, how, name, mean - sd, mean + sd)
            _mark(axes, history.switches(row, column, layout.x), how["color"])
            lines.append(curve)
    return (figure, every, lines) if any(len(curve.x) > 1 for curve in lines) else None


def _with(table: Table, history: History, key: str) -> tuple[list[Key], list[Key]]:
    """The rows and columns whose runs logged ``key``."""
    places = [place for place in table.cells if history.curve(*place, key) is not None]
    rows, columns = {row for row, _ in places}, {column for _, column in places}
    return [row for row in table.rows if row in rows], [
        column for column in table.columns if column in columns
    ]


def _line(
    axes: Axes, curve: Curve, how: dict[str, Any], name: str, low: np.ndarray, high: np.ndarray
) -> None:
    """The mean with a band; markers are few, and lie elsewhere on each line."""
    every = max(1, len(curve.x) // MARKS)
    marks = (len(axes.lines) % every, every)
    axes.plot(curve.x, curve.mean, label=name, markevery=marks, **how)
    if curve.n > 1:
        axes.fill_between(curve.x, low, high, color=how["color"], alpha=0.15, linewidth=0)


def _mark(axes: Axes, switches: list[float], colour: str) -> None:
    for x in sorted(set(switches)):
        mark = axes.axvline(x, color=colour, linestyle=(0, (1, 1.5)), label=SWITCHES, zorder=0)
        mark.set_gid(MARK)


def _add_labels(
    figure: Figure, every: list[Axes], table: Table, what: str, layout: Layout
) -> Figure:
    if layout.ylim:
        every[0].set_ylim(layout.ylim)
    x_label(figure, OVER[layout.x])
    figure.supylabel(what, fontsize="medium")
    title(figure, table, layout)
    return figure
