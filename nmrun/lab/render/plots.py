"""The pictures of a comparison, by kind: a point a cell, or learning curves."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox, ScaledTranslation

from nmrun.errors import ConfigError
from nmrun.lab.compare import notation
from nmrun.lab.compare.comparison import Comparison, Query, compare, one_metric
from nmrun.lab.compare.notation import Key, but_ratio, scale
from nmrun.lab.compare.runs import usual_metric
from nmrun.lab.compare.tables import Table, build
from nmrun.lab.render.curves import History, curves
from nmrun.lab.render.style import (
    FEW,
    GREY,
    INK,
    REFERENCE_LINES,
    Layout,
    fit,
    heading,
    legend,
    look,
    looks,
    named,
    of_number,
    panels,
    title,
    x_label,
)
from nmrun.patterns import Pattern, PatternError

REFERENCE = {"marker": "s", "markerfacecolor": "none"}
OTHERS = {"color": "#bbbbbb", "linewidth": 0.7, "zorder": 0}
FLOPS = "flops/training_arithmetic"
Name = tuple[str, float, float, float, str]  # text, x, y, points to the right, colour
BESIDE = 6  # points between rows that would cover each other
HALF = 3  # points; of a marker
PLACES = ((4, 4), (4, -4), (-4, 4), (-4, -4))  # of a name beside its point, in points
APART = 0.13  # of the distance between two rows, between data sets
PLAIN = Layout()


@dataclass(frozen=True)
class Kind:
    """A kind of picture. ``draw`` gives None if runs have nothing of this kind; ``nothing`` says
    so."""

    draw: Callable[[History, str, Layout], Figure | None]
    about: str
    nothing: str


def draw(kind: str, history: History, logged: str, layout: Layout = PLAIN) -> Figure | None:
    """The picture of a kind, or learning curves of ``logged``; None where there is nothing to show."""
    return _finished(lambda: KINDS[kind].draw(history, logged, layout))


def _finished(drawn: Callable[[], Figure | None]) -> Figure | None:
    with looks():
        figure = drawn()
        if figure is not None:
            legend(figure)
            fit(figure)
    return figure


def logged(table: Table) -> str:
    """A table's metric as ``metrics.jsonl`` has it, of the validation split: ``eval/accuracy``."""
    split, _, name = table.metric.removeprefix("best/").partition("/")
    tasks = split in ("test", "eval")
    return f"eval/{name if tasks else usual_metric(table.runs).partition('/')[2]}"


def plot(runs: pd.DataFrame, query: Query, kind: str, layout: Layout = PLAIN) -> list[Figure]:
    """A picture for each data set and model of a query that has something of this kind; for
    ``overall`` one.

    The metric of ``curves`` is one that was logged. Raises ConfigError where the runs have nothing
    of this kind, and for a baseline of a kind that has none.
    """
    if kind == "overall":
        comparison = compare(runs, query)
        figure = _finished(lambda: over_all_cells(comparison, layout))
        return [figure] if figure else []
    if query.baseline:
        raise ConfigError("--baseline is for --kind overall")
    one_metric(query)
    metric = "".join(query.metrics) if kind == "curves" else ""
    if metric:  # logged while training goes on; the results need not have it
        query = replace(query, metrics=())
    tables = compare(runs, query).tables
    drawings = [draw(kind, History(each), metric or logged(each), layout) for each in tables]
    figures = [figure for figure in drawings if figure is not None]
    if not figures:
        raise ConfigError(f"--kind {kind}: {KINDS[kind].nothing}")
    return figures


# --- against the columns --------------------------------------------------------------------------


def ratio(table: Table, layout: Layout) -> Figure | None:
    """The mean with the standard deviation as error bars, one line a row, against the columns:
    ratios, or a setting that is a number. None for a table without values.

    What has no column of its own (dense) is a horizontal band. Of more than ``FEW`` rows each has a
    panel, with the others in grey.
    """
    if all(cell.mean is None for cell in table.cells.values()):
        return None
    none = ("-",) * len(table.column_keys)
    bands = [
        row
        for row in table.rows
        if (row in table.references and len(table.columns_of(row)) == 1)
        or {c for r, c in table.cells if r == row} == {none}
    ]
    rows = [row for row in table.rows if row not in bands]
    columns = [column for column in table.columns if column != none] or table.columns
    numbers = _numbers(columns)
    places = dict(zip(columns, numbers or range(len(columns)), strict=True))
    if len(rows) > FEW:
        figure, every = panels([named(table, row) for row in rows], layout)
        groups = [(axes, [row]) for axes, row in zip(every, rows, strict=True)]
    else:
        width = max(5.2, 2.8 + 1.0 * len(columns)) if numbers is None else 6.2
        figure = Figure(figsize=layout.size(width, 3.4), layout="constrained")
        groups = [(figure.subplots(), rows)]
    for axes, lines in groups:
        for row in rows:
            if row not in lines:
                _errors(axes, table, row, places, bars=False, **OTHERS)
        # side by side, so that error bars do not cover each other, nor reach the next ratio
        apart = min(0.06, 0.7 / max(1, len(lines))) if numbers is None else 0.0
        for i, row in enumerate(lines):
            shift = apart * (i - (len(lines) - 1) / 2)
            x = {column: place + shift for column, place in places.items()}
            how = _look(table, row) | ({"label": named(table, row)} if lines is rows else {})
            _errors(axes, table, row, x, **how)
        for row, line in zip(bands, itertools.cycle(REFERENCE_LINES), strict=False):
            _band(axes, table, row, line)
        _x_axis(axes, columns, numbers)
        if layout.ylim:
            axes.set_ylim(layout.ylim)
    shares = "N:M, and the share of the weights it keeps"
    x_label(figure, shares if table.column_keys == ("sparsity",) else ", ".join(table.column_keys))
    figure.supylabel(notation.metric(table.metric), fontsize="medium")
    title(figure, heading(table), layout)
    return figure


def alone(table: Table) -> bool:
    """Whether a table has a single value, so that a picture would show only a dot."""
    cells = [cell for row in table.rows for cell in table.cells_of(row)]
    return sum(cell.mean is not None for cell in cells) < 2


def _numbers(columns: list[Key]) -> list[float] | None:
    """The columns as numbers, if they are."""
    try:
        return [float(text) for (text,) in columns]
    except ValueError:
        return None


def _look(table: Table, row: Key) -> dict[str, Any]:
    return look(table, row) | (REFERENCE if row in table.references else {})


def _errors(
    axes: Axes, table: Table, row: Key, x: Mapping[Key, float], bars: bool = True, **how: Any
) -> Any:
    """Draw a row at these places of its columns, with a gap between columns that differ in more than
    the ratio. Gives what was drawn."""
    unit, points = scale(table.metric), list[tuple[float, float, float]]()
    keys, before = table.column_keys, None
    for column, place in x.items():
        cell = table.cells.get((row, column))
        if cell is None or cell.mean is None:
            continue
        setting = but_ratio(keys, column) if "sparsity" in keys else None
        if points and setting != before:
            points.append((math.nan,) * 3)
        points.append((place, unit * cell.mean, unit * (math.nan if cell.sd is None else cell.sd)))
        before = setting
    places, means, deviations = zip(*points, strict=True) if points else ((), (), ())
    return axes.errorbar(places, means, deviations if bars else None, elinewidth=0.9, **how)


def _band(axes: Axes, table: Table, row: Key, line: str) -> None:
    """A row without columns of its own as a horizontal line, a standard deviation to each side."""
    cell = next(cell for (r, _), cell in table.cells.items() if r == row)
    if cell.mean is not None:
        unit = scale(table.metric)
        mean, sd = unit * cell.mean, unit * (cell.sd or 0.0)
        colour = look(table, row)["color"]
        axes.axhline(mean, color=colour, linestyle=line, zorder=0, label=named(table, row))
        axes.axhspan(mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0)


def _x_axis(axes: Axes, columns: list[Key], numbers: list[float] | None) -> None:
    if numbers is None:
        axes.set_xticks(range(len(columns)), [_tick(column) for column in columns])
        axes.set_xlim(-0.5, len(columns) - 0.5)
    elif min(numbers) > 0 and max(numbers) >= 10 * min(numbers):
        axes.set_xscale("log")
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.minorticks_off()


def _tick(column: Key) -> str:
    try:
        (ratio,) = column
        return f"{ratio}\n{100 * Pattern.parse(ratio).density:.3g} %"
    except (ValueError, PatternError):
        return "\n".join(column)


# --- against the cost -----------------------------------------------------------------------------


def flops(table: Table, layout: Layout) -> Figure | None:
    """The metric against the FLOPs of training without the multiplications by zero, one line a row.
    None where no FLOPs are known.

    The columns' names stand beside the points where they have room, that of a single column below
    the axis. Rows that cost the same stand side by side, so that their error bars can be told
    apart.
    """
    if FLOPS not in table.runs.columns:
        return None
    spent = build(table.runs, FLOPS, table.row_keys, table.column_keys).cells
    means = {place: cell.mean for place, cell in table.cells.items() if cell.mean is not None}
    costs = {
        row: {
            column: cell.mean
            for _, column in table.columns_of(row)
            if (row, column) in means
            and (cell := spent.get((row, column))) is not None
            and cell.mean is not None
        }
        for row in table.rows
    }
    every = [cost for of_row in costs.values() for cost in of_row.values()]
    if not every:
        return None
    figure = Figure(figsize=layout.size(6.2, 3.6), layout="constrained")
    axes = figure.subplots()
    names: list[Name] = []
    for row, x in costs.items():
        if not x:
            continue
        alike = [other for other, cost in costs.items() if cost == x]
        aside = BESIDE * (alike.index(row) - (len(alike) - 1) / 2)
        how = _look(table, row)
        container = _errors(axes, table, row, x, label=named(table, row), **how)
        shift = ScaledTranslation(aside / 72, 0, figure.dpi_scale_trans)
        for part in container.get_children():
            part.set_transform(axes.transData + shift)
        if row not in table.references and len(table.columns) > 1:
            y = {column: scale(table.metric) * means[row, column] for column in x}
            names += [(" ".join(c), x[c], y[c], aside, how["color"]) for c in x]
    # within a decade a logarithmic axis has hardly any labels, or too many
    if max(every) > 10 * min(every):
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 220G
    column = table.columns[0] if len(table.columns) == 1 else ()
    axes.set_xlabel(", at ".join([notation.metric(FLOPS), *column]))
    axes.set_ylabel(notation.metric(table.metric))
    if layout.ylim:
        axes.set_ylim(layout.ylim)
    title(figure, heading(table), layout)
    _name(figure, axes, names)
    return figure


def _name(figure: Figure, axes: Axes, points: list[Name]) -> None:
    """Write the names beside the points, those of the lowest first, where they cover neither a
    point nor another name. One without such a place is left out.
    """
    figure.draw_without_rendering()  # positions are known after the layout
    inch = figure.dpi / 72
    boxes = [
        Bbox.from_bounds(left + inch * (aside - HALF), low - inch * HALF, *(2 * inch * HALF,) * 2)
        for _, x, y, aside, _ in points
        for left, low in [axes.transData.transform((x, y))]
    ]
    for name, x, y, aside, colour in sorted(points, key=lambda point: point[2]):
        for right, up in PLACES:
            text = axes.annotate(
                name,
                (x, y),
                xytext=(right + aside, up),
                textcoords="offset points",
                fontsize=7,
                color=colour,
                ha="left" if right > 0 else "right",
                va="bottom" if up > 0 else "top",
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in boxes):
                boxes.append(box)
                break
            text.remove()


# --- against a baseline ---------------------------------------------------------------------------


def over_all_cells(comparison: Comparison, layout: Layout) -> Figure:
    """The difference of each cell, and that of each data set with its interval."""
    tables, rows = comparison.tables, comparison.overall
    keys, every = tables[0].row_keys, list(dict.fromkeys(d for each in rows for d in each.parts))
    baseline = dict.fromkeys(row for table in tables for row in table.baseline)
    against = ", ".join(" ".join(notation.column(keys, row)) for row in baseline)
    figure = Figure(figsize=layout.size(2.6 + 1.05 * len(rows), 3.4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.0, color=GREY, linestyle="--", linewidth=0.9, zorder=0)
    for i, data in enumerate(every):
        aside = APART * (i + 1.5 - len(every) / 2)
        parts = {place + aside: r.parts[data] for place, r in enumerate(rows) if data in r.parts}
        points = [(x, value) for x, part in parts.items() for value in part.means]
        how = {**of_number(i), "linestyle": "none", "markersize": 4, "alpha": 0.8}
        axes.plot(*zip(*points, strict=True), label=notation.written(data), **how)
        for x, part in parts.items():
            if part.gap.low is not None and part.gap.high is not None:
                axes.plot([x, x], [part.gap.low, part.gap.high], color=INK, linewidth=1.2, zorder=1)
    labels = (" ".join(notation.column(keys, each.row)) for each in rows)
    axes.set_xticks(range(len(rows)), ["\n".join(textwrap.wrap(label, 14)) for label in labels])
    axes.set_ylabel(f"better than {against} by\nstandard deviations of a run")
    if layout.ylim:
        axes.set_ylim(layout.ylim)
    title(figure, f"Against {against}, with 95 % intervals of each data set", layout)
    return figure


KINDS = {
    "ratio": Kind(
        lambda history, _, layout: ratio(history.table, layout),
        "The metric against the ratio",
        "no run has finished",
    ),
    "curves": Kind(
        curves,
        "Learning curves; a vertical line is where STEP begins to learn masks",
        "no finished run has this metric at two steps or more in its metrics.jsonl",
    ),
    "flops": Kind(
        lambda history, _, layout: flops(history.table, layout),
        "The metric against the FLOPs of training",
        "no finished run has its FLOPs of training on record",
    ),
}
