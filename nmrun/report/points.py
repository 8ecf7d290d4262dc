"""A point a cell: the metric against the ratio, and against what the training cost."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

from nmrun.patterns import Pattern, PatternError
from nmrun.report.captions import title
from nmrun.report.numbers import labelled, scale
from nmrun.report.style import label, look, plain
from nmrun.report.tables import Key, Table, build

FLOPS = "flops/training_arithmetic"


def ratio(table: Table) -> Figure | None:
    """Mean with the standard deviation as error bars, one line a row; dense as a horizontal band."""
    if all(cell.mean is None for cell in table.cells.values()):
        return None
    unit = scale(table.metric)
    figure = Figure(figsize=(max(5.6, 3.2 + 1.2 * len(table.columns)), 4.0), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in table.rows if row not in table.references]
    # side by side, so that error bars do not cover each other, nor reach the next ratio
    spread = min(0.06, 0.7 / max(1, len(rows)))
    for i, row in enumerate(rows):
        cells = [
            (x, table.cells[row, column])
            for x, column in enumerate(table.columns)
            if (row, column) in table.cells
        ]
        known = [(x, cell.mean, cell.sd) for x, cell in cells if cell.mean is not None]
        shift = spread * (i - (len(rows) - 1) / 2)
        axes.errorbar(
            [x + shift for x, _, _ in known], [unit * mean for _, mean, _ in known],
            [math.nan if sd is None else unit * sd for _, _, sd in known],
            label=label(table, row), **look(table, row), capsize=2, markersize=5, linewidth=1.2, elinewidth=0.9,
        )  # fmt: skip
    for row in (row for row in table.rows if row in table.references):
        cell = table.cells[row, table.columns[0]]
        if cell.mean is not None:
            mean, sd = unit * cell.mean, unit * (cell.sd or 0.0)
            axes.axhline(mean, label=label(table, row), zorder=0, **look(table, row))
            axes.axhspan(mean - sd, mean + sd, color="grey", alpha=0.15, linewidth=0)
    axes.set_xticks(range(len(table.columns)), [_tick(column) for column in table.columns])
    axes.set_xlim(-0.5, len(table.columns) - 0.5)
    axes.set_xlabel(
        "N:M, and the weights it keeps"
        if table.column_keys == ("sparsity",)
        else " ".join(table.column_keys)
    )
    axes.set_ylabel(f"{labelled(table.metric)} (mean, sd)")
    figure.suptitle(title(table), fontsize=10)
    plain(axes)
    return figure


def flops(table: Table, runs: pd.DataFrame) -> Figure | None:
    """Mean of the metric, with its standard deviation, against the FLOPs of training without the
    multiplications by zero; one line a row through its columns, their names beside the points where
    they have room.
    """
    if FLOPS not in runs.columns:
        return None
    cost = build(runs, FLOPS, table.row_keys, table.column_keys)
    unit = scale(table.metric)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    drawn: list[tuple[float, float]] = []
    named: list[tuple[str, float, float, str]] = []
    for row in table.rows:
        columns = table.columns[:1] if row in table.references else table.columns
        found = []
        for column in columns:
            cell, spent = table.cells.get((row, column)), cost.cells.get((row, column))
            if (
                cell is not None
                and spent is not None
                and cell.mean is not None
                and spent.mean is not None
            ):
                found.append(
                    (
                        column,
                        spent.mean,
                        unit * cell.mean,
                        math.nan if cell.sd is None else unit * cell.sd,
                    )
                )
        if not found:
            continue
        style = (
            {"marker": "s", "markerfacecolor": "none", **look(table, row)}
            if row in table.references
            else look(table, row)
        )
        axes.errorbar(
            [x for _, x, _, _ in found], [y for _, _, y, _ in found], [sd for _, _, _, sd in found],
            label=label(table, row), **style, capsize=2, markersize=5, linewidth=1.2, elinewidth=0.9,
        )  # fmt: skip
        if row not in table.references:
            named += [(" ".join(column), x, y, style["color"]) for column, x, y, _ in found]
        drawn += [(x, y) for _, x, y, _ in found]
    if not drawn:
        return None
    costs = [x for x, _ in drawn]
    # within a decade a logarithmic axis has hardly a number, or too many
    if max(costs) > 10 * min(costs):
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 220G
    axes.set_xlabel("FLOPs of training, without the multiplications by zero")
    axes.set_ylabel(f"{labelled(table.metric)} (mean, sd)")
    figure.suptitle(title(table), fontsize=10)
    plain(axes)
    _name(figure, axes, named)
    return figure


def _name(figure: Figure, axes: Axes, points: list[tuple[str, float, float, str]]) -> None:
    """Write the names beside the points, those of the lowest first, and leave out whatever would
    cover a name that is there.
    """
    figure.draw_without_rendering()  # positions are known after the layout
    taken: list[Bbox] = []
    for name, x, y, colour in sorted(points, key=lambda point: point[2]):
        text = axes.annotate(
            name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour
        )
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


def _tick(column: Key) -> str:
    try:
        return (
            f"{column[0]}\n{100 * Pattern.parse(column[0]).density:.3g} %"
            if len(column) == 1
            else "\n".join(column)
        )
    except PatternError:
        return column[0]
