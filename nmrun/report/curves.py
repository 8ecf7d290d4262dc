"""What changes while training goes on: one panel a column of the table, one line a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun.report.captions import title
from nmrun.report.history import Curve, History
from nmrun.report.numbers import labelled, scale
from nmrun.report.style import label, look, panels
from nmrun.report.tables import Key, Table

FLIPS, SAMPLE, WINDOW = "sparsity/flip_rate", "step/variance_change", "step/variance_change_window"
MARKS = 7  # markers on a curve


def curves(table: Table, history: History, metric: str) -> Figure | None:
    """``metric`` over steps: mean, and a band of one standard deviation over seeds. STEP's switches
    are vertical lines.
    """
    found = _over_steps(table, history, metric, scale(metric))
    if found is None:
        return None
    figure, every, drawn = found
    if (
        scale(metric) == 100.0
        # where training begins is of no interest: let the axis begin where the curves are after a tenth
        # of it
    ):
        low = min(float(curve.mean[curve.steps >= 0.1 * curve.steps[-1]].min()) for curve in drawn)
        every[0].set_ylim(bottom=max(0.0, 100.0 * low - 2.0))
    return _labelled(figure, table, f"{labelled(metric)} (mean, sd)")


def flips(table: Table, history: History) -> Figure | None:
    """The flip rate over steps, in percent of the mask entries."""
    found = _over_steps(table, history, FLIPS, 100.0)
    if found is None:
        return None
    axes = found[1][0]
    if (
        axes.get_ylim()[1] > 5.0
        # masks that change all at once, now and then, beside ones that change bit by bit: linear up to
        # 1 %
    ):
        axes.set_yscale("symlog", linthresh=1.0, linscale=1.5)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0.0)
    return _labelled(found[0], table, "flip rate in % of the mask (mean, sd)")


def autoswitch(table: Table, history: History) -> Figure | None:
    """The samples of AutoSwitch, the mean of its window and the threshold (if it is Adam's eps);
    shaded is where the window may decide (t_min to t_max).
    """
    rows, columns = _with(table, history, WINDOW)
    if not columns:
        return None
    figure, every = panels(table, columns)
    for axes, column in zip(every, columns, strict=True):
        for row in rows:
            sample, window = (history.curve(row, column, key) for key in (SAMPLE, WINDOW))
            if sample is None or window is None:
                continue
            style, name = look(table, row), label(table, row)
            axes.plot(
                sample.steps,
                sample.mean,
                color=style["color"],
                linewidth=0.8,
                alpha=0.6,
                label=f"{name}: sample",
            )
            _line(axes, window, style, f"{name}: mean of the window", window.low, window.high)
            _mark(axes, history.switches(row, column), style["color"])
            run = history.cells[row, column][0]
            first, last = (
                run[f"recipe.{key}"] * history.last_step(run) for key in ("t_min", "t_max")
            )
            axes.axvspan(first, last, color="grey", alpha=0.12, linewidth=0, label="t_min to t_max")
            if pd.isna(run.get("recipe.threshold")):  # a relative one is no constant
                axes.axhline(
                    run["optimizer.eps"],
                    color="#555555",
                    linestyle="--",
                    linewidth=1.2,
                    label="threshold, Adam's eps",
                )
        axes.set_yscale("log")
    return _labelled(figure, table, "mean change of the second moment\n(mean, range over seeds)")


def _over_steps(
    table: Table, history: History, key: str, unit: float
) -> tuple[Figure, list[Axes], list[Curve]] | None:
    rows, columns = _with(table, history, key)
    if not columns:
        return None
    figure, every = panels(table, columns)
    drawn = []
    for axes, column in zip(every, columns, strict=True):
        for row in rows:
            curve = history.curve(row, column, key)
            if curve is not None:
                style = look(table, row)
                mean, sd = unit * curve.mean, unit * curve.sd
                _line(
                    axes,
                    Curve(curve.steps, mean, sd, mean, mean, curve.n),
                    style,
                    label(table, row),
                    mean - sd,
                    mean + sd,
                )
                _mark(axes, history.switches(row, column), style["color"])
                drawn.append(curve)
    return figure, every, drawn


def _with(table: Table, history: History, key: str) -> tuple[list[Key], list[Key]]:
    """The rows and columns whose runs logged ``key``."""
    places = [place for place in table.cells if history.curve(*place, key) is not None]
    rows, columns = {row for row, _ in places}, {column for _, column in places}
    return [row for row in table.rows if row in rows], [
        column for column in table.columns if column in columns
    ]


def _line(
    axes: Axes, curve: Curve, style: dict[str, Any], name: str, low: np.ndarray, high: np.ndarray
) -> None:
    """The mean with a band; markers are few, and lie elsewhere on each line."""
    every = max(1, len(curve.steps) // MARKS)
    marks = (len(axes.lines) % every, every)
    axes.plot(
        curve.steps, curve.mean, label=name, markevery=marks, markersize=4.5, linewidth=1.2, **style
    )
    if curve.n > 1:
        axes.fill_between(curve.steps, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _mark(axes: Axes, switches: list[int], colour: str) -> None:
    for step in sorted(set(switches)):
        axes.axvline(
            step,
            color=colour,
            linestyle=(0, (1, 1.5)),
            linewidth=1.4,
            label="STEP's switch",
            zorder=0,
        )


def _labelled(figure: Figure, table: Table, what: str) -> Figure:
    figure.supxlabel("training step", fontsize=10)
    figure.supylabel(what, fontsize=10)
    figure.suptitle(title(table), fontsize=10)
    return figure
