"""The pictures of a comparison, by kind."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure

from nmrun.errors import ConfigError
from nmrun.lab.compare import notation
from nmrun.lab.compare.comparison import Comparison, Query, compare, keys, one_metric
from nmrun.lab.compare.runs import check_name, usual_metric
from nmrun.lab.compare.tables import Table
from nmrun.lab.render import curves, points
from nmrun.lab.render.curves import History
from nmrun.lab.render.style import GREY, INK, LETTERS, Layout, fit, legend, looks, of_number

BESIDE = 0.13  # of the distance between two rows, between data sets
PLAIN = Layout()


@dataclass(frozen=True)
class Kind:
    """A kind of picture. ``draw`` gives None if runs have nothing of this kind; ``nothing`` says
    so."""

    draw: Callable[[History, str, Layout], Figure | None]
    about: str
    nothing: str


PLOTS = {
    "ratio": Kind(
        lambda history, _, layout: points.ratio(history.table, layout),
        "The metric against the ratio",
        "no run has finished",
    ),
    "curves": Kind(
        curves.curves,
        "Learning curves; a vertical line is where STEP begins to learn masks",
        "no finished run has this metric at two steps or more in its metrics.jsonl",
    ),
    "flops": Kind(
        lambda history, _, layout: points.flops(history.table, layout),
        "The metric against the FLOPs of training",
        "no finished run has its FLOPs of training on record",
    ),
}


def draw(kind: str, history: History, logged: str, layout: Layout = PLAIN) -> Figure | None:
    """The picture of a kind, or learning curves of ``logged``; None where there is nothing to show."""
    with looks():
        figure = PLOTS[kind].draw(history, logged, layout)
        if figure is not None:
            legend(figure)
            fit(figure)
    return figure


def logged(table: Table) -> str:
    """A table's metric as ``metrics.jsonl`` has it, of the validation split: ``eval/accuracy``."""
    split, _, name = table.metric.removeprefix("best/").partition("/")
    tasks = split in ("test", "eval")
    return f"eval/{name if tasks else usual_metric(table.runs).partition('/')[2]}"


def along(x: str | None, kind: str, query: Query) -> tuple[Query, str]:
    """The x axis of a picture: ``step``, ``epoch`` or ``seconds`` for logged values; for ``ratio``
    any config key, which becomes the query's columns.

    Raises ConfigError for an ``x`` or a baseline that this kind of picture has not.
    """
    if kind == "curves":
        if x not in (None, *curves.OVER):
            raise ConfigError(f"--x {x}: curves are over {', '.join(curves.OVER)}")
    elif x:
        if kind != "ratio" or query.cols:
            raise ConfigError("--x KEY is for --kind ratio without --cols")
        query = replace(query, cols=keys(x))
    if kind == "overall":
        query = replace(query, overall=True)
    elif query.baseline:
        raise ConfigError("--baseline is for --kind overall")
    return query, (x or "step") if kind == "curves" else "step"


def plot(runs: pd.DataFrame, query: Query, kind: str, layout: Layout = PLAIN) -> list[Figure]:
    """A picture for each data set and model of a query that has something of this kind; for
    ``overall`` one.

    ``query`` is as :func:`along` gives it; the metric of ``curves`` is one that was logged. Raises
    ConfigError where the runs have nothing of this kind.
    """
    if kind == "overall":
        comparison = compare(runs, query)
        return [over_all_cells(comparison, layout)]
    metric = ",".join(query.metrics) if kind == "curves" else ""
    if metric:  # logged while training goes on; the results need not have it
        query = replace(query, metrics=())
    one_metric(query)
    tables = compare(runs, query).tables
    histories = [History(table) for table in tables]
    if metric:
        check_name(metric, sorted({key for each in histories for key in each.logged()}), "metric")
    drawings = [draw(kind, each, metric or logged(each.table), layout) for each in histories]
    figures = [figure for figure in drawings if figure is not None]
    if not figures:
        raise ConfigError(f"--kind {kind}: {PLOTS[kind].nothing}")
    return figures


def over_all_cells(comparison: Comparison, layout: Layout) -> Figure:
    """The difference of each cell, and that of each data set with its interval."""
    tables, rows = comparison.tables, comparison.overall
    keys, every = tables[0].row_keys, list(dict.fromkeys(d for each in rows for d in each.parts))
    baseline = dict.fromkeys(row for table in tables for row in table.baseline)
    against = ", ".join(" ".join(notation.column(keys, row)) for row in baseline)
    with looks():
        figure = Figure(figsize=layout.size(2.6 + 1.05 * len(rows), 3.4), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0.0, color=GREY, linestyle="--", linewidth=0.9, zorder=0)
        for i, data in enumerate(every):
            points = [
                (place + BESIDE * (i + 1.5 - len(every) / 2), value)
                for place, each in enumerate(rows)
                if data in each.parts
                for value in each.parts[data].means
            ]
            how = {**of_number(i), "linestyle": "none", "markersize": 4, "alpha": 0.8}
            axes.plot(*zip(*points, strict=True), label=notation.written(data), **how)
            for place, each in enumerate(rows):
                gap = each.parts[data].gap if data in each.parts else None
                if gap is not None and gap.low is not None and gap.high is not None:
                    x = place + BESIDE * (i + 1.5 - len(every) / 2)
                    axes.plot([x, x], [gap.low, gap.high], color=INK, linewidth=1.2, zorder=1)
        labels = (" ".join(notation.column(keys, each.row)) for each in rows)
        axes.set_xticks(range(len(rows)), ["\n".join(textwrap.wrap(label, 14)) for label in labels])
        axes.set_ylabel(f"better than {against} by\nstandard deviations of a run")
        if layout.ylim:
            axes.set_ylim(layout.ylim)
        own_title = f"Against {against}, with 95 % intervals of each data set"
        if text := own_title if layout.title is None else layout.title:
            figure.suptitle(textwrap.fill(text, int(LETTERS * figure.get_figwidth())))
        legend(figure)
        fit(figure)
    return figure
