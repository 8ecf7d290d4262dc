"""The comparison as a picture: the metric against the ratio, one line a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from nmrun.report.statistics import Cell
from nmrun.report.tables import Table

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito, for colour-blind readers
MARKERS = "osD^vPX"


def plot(table: Table, out: Path) -> None:
    """Mean with the standard deviation as error bars; dense as a band. The format follows the suffix of ``out``."""
    scale = 100.0 if "accuracy" in table.metric else 1.0
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.2 * len(table.columns), 4.0), layout="constrained")
    rows = [row for row in table.rows if not (table.dense is not None and row.split(" ")[0] == "dense")]
    for i, row in enumerate(rows):
        points: list[tuple[float, Cell, float]] = []
        for x, column in enumerate(table.columns):
            cell = table.cells.get((row, column))
            if cell is not None and cell.mean is not None:
                points.append((x + 0.06 * (i - (len(rows) - 1) / 2), cell, scale * cell.mean))
        spread = [scale * (cell.sd or 0.0) for _, cell, _ in points]
        look: dict[str, Any] = {"color": COLOURS[i % 7], "marker": MARKERS[i % 7]}
        axes.errorbar([x for x, _, _ in points], [y for _, _, y in points], spread, capsize=3, markersize=5, label=row, **look)
    if table.dense is not None and table.dense.mean is not None:
        mean, sd = scale * table.dense.mean, scale * (table.dense.sd or 0.0)
        axes.axhline(mean, color="grey", linestyle="--", label="dense")
        axes.axhspan(mean - sd, mean + sd, color="grey", alpha=0.15, linewidth=0)
    axes.set_xticks(range(len(table.columns)), table.columns)
    axes.set_xlabel(table.column_name)
    axes.set_ylabel(table.metric + (" in %" if scale == 100.0 else ""))
    axes.set_title(table.title, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
