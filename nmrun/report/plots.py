"""The comparison as a picture: the metric against the ratio, one line a recipe."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from nmrun.patterns import Pattern, PatternError
from nmrun.report.formats import title
from nmrun.report.tables import Key, Table

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito: for colour-blind readers
MARKERS = "osD^vPX*"  # one more than colours, so that no two of the first 56 lines look the same


def plot(table: Table, out: Path) -> None:
    """Mean with the standard deviation as error bars; dense as a horizontal band. The format follows the suffix of ``out``."""
    scale = 100.0 if "accuracy" in table.metric else 1.0
    figure, axes = pyplot.subplots(figsize=(3.2 + 1.2 * len(table.columns), 4.0), layout="constrained")
    rows = [row for row in table.rows if row not in table.references]
    for i, row in enumerate(rows):
        cells = [(x, table.cells[row, column]) for x, column in enumerate(table.columns) if (row, column) in table.cells]
        points = [
            (x, scale * cell.mean, math.nan if cell.sd is None else scale * cell.sd)
            for x, cell in cells
            if cell.mean is not None
        ]
        shift = 0.06 * (i - (len(rows) - 1) / 2)  # side by side, so that error bars do not cover each other
        axes.errorbar(
            [x + shift for x, _, _ in points], [y for _, y, _ in points], [sd for _, _, sd in points],
            label=_label(table, row), color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], capsize=3, markersize=5,
        )  # fmt: skip
    for i, row in enumerate(row for row in table.rows if row in table.references):
        cell = table.cells[row, table.columns[0]]
        if cell.mean is not None:
            mean, sd = scale * cell.mean, scale * (cell.sd or 0.0)
            axes.axhline(mean, color="grey", linestyle=("--", ":", "-.")[i % 3], label=_label(table, row), zorder=0)
            axes.axhspan(mean - sd, mean + sd, color="grey", alpha=0.15, linewidth=0)
    axes.set_xticks(range(len(table.columns)), [_tick(column) for column in table.columns])
    axes.set_xlim(-0.5, len(table.columns) - 0.5)
    axes.set_xlabel("N:M, and the weights it keeps" if table.column_keys == ("sparsity",) else " ".join(table.column_keys))
    axes.set_ylabel(f"{table.metric}{' in %' if scale == 100.0 else ''} (mean, sd)")
    axes.set_title(title(table), fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _label(table: Table, row: Key) -> str:
    """The row, and how many of its runs the picture does not show."""
    cells = {
        id(cell): cell for (r, _), cell in table.cells.items() if r == row
    }.values()  # a reference is one cell in all columns
    missing = sum(sum(cell.without.values()) for cell in cells)
    return " ".join(row) + (f" ({missing} not finished)" if missing else "")


def _tick(column: Key) -> str:
    try:
        return f"{column[0]}\n{100 * Pattern.parse(column[0]).density:.3g} %" if len(column) == 1 else "\n".join(column)
    except PatternError:
        return column[0]
