"""``nmrun plot --kind overall``: the rows against the baseline, a point a cell, and all together."""

from __future__ import annotations

import textwrap

from matplotlib.figure import Figure

from nmrun.lab.report import names
from nmrun.lab.report.comparison import Comparison
from nmrun.lab.report.overall import Overall
from nmrun.lab.report.style import GREY, INK, LETTERS, Layout, high_enough, legend, looks, of_number

BESIDE = 0.13  # of the distance between two rows, between data sets


def draw(comparison: Comparison, layout: Layout) -> Figure:
    """Draw the mean difference of each cell, data sets side by side, and that of all cells with its
    95 % interval.
    """
    tables, rows = comparison.tables, comparison.overall
    keys, every = tables[0].row_keys, list(dict.fromkeys(d for each in rows for d in each.parts))
    own = dict.fromkeys(row for table in tables for row in table.baseline)
    against = ", ".join(" ".join(names.column(keys, row, layout.labels)) for row in own)
    with looks():
        figure = Figure(figsize=layout.size(2.6 + 1.05 * len(rows), 3.4), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0.0, color=GREY, linestyle="--", linewidth=0.9, zorder=0)
        for i, data in enumerate(every):
            points = [
                (place + BESIDE * (i + 1 - len(every) / 2), value)
                for place, each in enumerate(rows)
                if data in each.parts
                for value in each.parts[data].means
            ]
            how = {**of_number(i), "linestyle": "none", "markersize": 4, "alpha": 0.8}
            axes.plot(*zip(*points, strict=True), label=names.written(data, layout.labels), **how)
        axes.errorbar(
            [place - BESIDE * (1 + len(every) / 2) for place in range(len(rows))],
            [each.mean.value for each in rows],
            [[_to(each, each.mean.low) for each in rows], [_to(each, each.mean.high) for each in rows]],
            color=INK, marker="D", markersize=5, linestyle="none", elinewidth=1.6, label="all cells, 95 %",
        )  # fmt: skip
        labels = (" ".join(names.column(keys, each.row, layout.labels)) for each in rows)
        axes.set_xticks(range(len(rows)), ["\n".join(textwrap.wrap(one, 14)) for one in labels])
        axes.set_ylabel(f"better than {against} by\nstandard deviations of a run")
        if layout.ylim:
            axes.set_ylim(layout.ylim)
        own_title = f"Against {against}, all cells together"
        if text := own_title if layout.title is None else layout.title:
            figure.suptitle(textwrap.fill(text, int(LETTERS * figure.get_figwidth())))
        legend(figure)
        high_enough(figure, layout)
    return figure


def _to(each: Overall, end: float | None) -> float:
    """How far the interval's end is from the mean; nothing is drawn where it is not known."""
    return 0.0 if end is None else abs(end - each.mean.value)
