"""A point a cell: the metric against the ratio, and against what the training cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox, ScaledTranslation

from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import Key, but_ratio, scale
from nmrun.lab.compare.tables import Table, build
from nmrun.lab.render.style import REFERENCE_LINES, Layout, label, look, panels, title, x_label
from nmrun.patterns import Pattern, PatternError

REFERENCE = {"marker": "s", "markerfacecolor": "none"}
OTHERS = {"color": "#bbbbbb", "linewidth": 0.7, "zorder": 0}
FEW = 7  # at most so many rows in a panel
FLOPS = "flops/training_arithmetic"
Point = tuple[Key, float, float, float]  # column, x, y, deviation
Name = tuple[str, float, float, float, str]  # text, x, y, points to the right, colour
BESIDE = 6  # points between rows that would cover each other
HALF = 3  # points; of a marker
PLACES = ((4, 4), (4, -4), (-4, 4), (-4, -4))  # of a name beside its point, in points


def ratio(table: Table, layout: Layout) -> Figure | None:
    """The mean with the standard deviation as error bars, one line a row, against the columns:
    ratios, or a setting that is a number. None for a table without values.

    What has no column of its own (dense) is a horizontal band. Of more than ``FEW`` rows each has a
    panel, with the others in grey.
    """
    if all(cell.mean is None for cell in table.cells.values()):
        return None
    bands = {
        row
        for row in table.rows
        if (row in table.references and len(table.columns_of(row)) == 1)
        or {c for r, c in table.cells if r == row} == {("-",) * len(table.column_keys)}
    }
    rows = [row for row in table.rows if row not in bands]
    columns = [column for column in table.columns if set(column) != {"-"}] or table.columns
    numbers = _numbers(columns)
    if len(rows) > FEW:
        figure, every = panels([label(table, row) for row in rows], layout)
        groups = [
            (axes, [other for other in rows if other != row], [row])
            for axes, row in zip(every, rows, strict=True)
        ]
    else:
        width = max(5.2, 2.8 + 1.0 * len(columns)) if numbers is None else 6.2
        size = layout.size(width, 3.4)
        figure = Figure(figsize=size, layout="constrained")
        groups = [(figure.subplots(), [], rows)]
    for axes, others, lines in groups:
        for row in others:
            _errors(axes, table, row, columns, numbers, 0.0, OTHERS)
        # side by side, so that error bars do not cover each other, nor reach the next ratio
        apart = min(0.06, 0.7 / max(1, len(lines))) if numbers is None else 0.0
        for i, row in enumerate(lines):
            shift = apart * (i - (len(lines) - 1) / 2)
            entry = {"label": label(table, row)} if not others else {}
            how = {**look(table, row), **(REFERENCE if row in table.references else {})}
            _errors(axes, table, row, columns, numbers, shift, {**how, **entry})
        lined = [row for row in table.rows if row in bands]
        for row, line in zip(lined, itertools.cycle(REFERENCE_LINES), strict=False):
            _band(axes, table, row, line)
        _x_axis(axes, columns, numbers)
        if layout.ylim:
            axes.set_ylim(layout.ylim)
    shares = "N:M, and the share of the weights it keeps"
    x_label(figure, shares if table.column_keys == ("sparsity",) else ", ".join(table.column_keys))
    figure.supylabel(notation.metric(table.metric), fontsize="medium")
    title(figure, table, layout)
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


def _errors(
    axes: Axes,
    table: Table,
    row: Key,
    columns: list[Key],
    numbers: list[float] | None,
    shift: float,
    how: dict[str, Any],
) -> None:
    unit = scale(table.metric)
    places = numbers or list(range(len(columns)))
    points = [
        (column, x + shift, unit * cell.mean, unit * (math.nan if cell.sd is None else cell.sd))
        for x, column in zip(places, columns, strict=True)
        if (cell := table.cells.get((row, column))) is not None and cell.mean is not None
    ]
    positions, means, deviations = _coordinates(table, points)
    axes.errorbar(
        positions,
        means,
        None if how is OTHERS else deviations,
        elinewidth=0.9,
        **how,
    )


def _coordinates(
    table: Table, points: Sequence[Point]
) -> tuple[list[float], list[float], list[float]]:
    """The numbers of points, with a gap between columns that differ in more than the ratio."""
    keys, before = table.column_keys, None
    x: list[float] = []
    y: list[float] = []
    sd: list[float] = []
    for column, *point in points:
        setting = but_ratio(keys, column) if "sparsity" in keys else None
        gap = [math.nan] if x and setting != before else []
        for numbers, value in zip((x, y, sd), point, strict=True):
            numbers += [*gap, value]
        before = setting
    return x, y, sd


def _band(axes: Axes, table: Table, row: Key, line: str) -> None:
    """A row without columns of its own as a horizontal line, a standard deviation to each side."""
    cell = next(cell for (r, _), cell in table.cells.items() if r == row)
    if cell.mean is not None:
        unit = scale(table.metric)
        mean, sd = unit * cell.mean, unit * (cell.sd or 0.0)
        colour = look(table, row)["color"]
        name = label(table, row)
        axes.axhline(mean, color=colour, linestyle=line, zorder=0, label=name)
        axes.axhspan(mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0)


def _x_axis(axes: Axes, columns: list[Key], numbers: list[float] | None) -> None:
    if numbers is None:
        axes.set_xticks(range(len(columns)), [_tick(column) for column in columns])
        axes.set_xlim(-0.5, len(columns) - 0.5)
    elif min(numbers) > 0 and max(numbers) >= 10 * min(numbers):
        axes.set_xscale("log")
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.minorticks_off()


def flops(table: Table, layout: Layout) -> Figure | None:
    """The metric against the FLOPs of training without the multiplications by zero, one line a row.
    None where no FLOPs are known.

    The columns' names stand beside the points where they have room, that of a single column below
    the axis. Rows that cost the same stand side by side, so that their error bars can be told
    apart.
    """
    if FLOPS not in table.runs.columns:
        return None
    cost = build(table.runs, FLOPS, table.row_keys, table.column_keys)
    unit = scale(table.metric)
    figure = Figure(figsize=layout.size(6.2, 3.6), layout="constrained")
    axes = figure.subplots()
    costs: list[float] = []
    named: list[Name] = []
    aside = _aside(
        {
            row: [
                cost_cell.mean
                for (r, _), cost_cell in cost.cells.items()
                if r == row and cost_cell.mean
            ]
            for row in table.rows
        }
    )
    for row in table.rows:
        points = [
            (column, spent.mean, unit * cell.mean, unit * (math.nan if cell.sd is None else cell.sd))
            for _, column in table.columns_of(row)
            if (cell := table.cells.get((row, column))) is not None and cell.mean is not None
            and (spent := cost.cells.get((row, column))) is not None and spent.mean is not None
        ]  # fmt: skip
        if not points:
            continue
        how = look(table, row)
        if row in table.references:
            how |= REFERENCE
        positions, means, deviations = _coordinates(table, points)
        container = axes.errorbar(
            positions, means, deviations, label=label(table, row), **how, elinewidth=0.9
        )
        shift = ScaledTranslation(aside[row] / 72, 0, figure.dpi_scale_trans)
        for part in container.get_children():
            part.set_transform(axes.transData + shift)
        if row not in table.references and len(table.columns) > 1:
            named += [
                (" ".join(column), x, y, aside[row], how["color"]) for column, x, y, _ in points
            ]
        costs += [x for _, x, _, _ in points]
    if not costs:
        return None
    # within a decade a logarithmic axis has hardly any labels, or too many
    if max(costs) > 10 * min(costs):
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 220G
    column = table.columns[0] if len(table.columns) == 1 else ()
    axes.set_xlabel(", at ".join([notation.metric(FLOPS), *column]))
    axes.set_ylabel(notation.metric(table.metric))
    if layout.ylim:
        axes.set_ylim(layout.ylim)
    title(figure, table, layout)
    _name(figure, axes, named)
    return figure


def _aside(costs: dict[Key, list[float]]) -> dict[Key, float]:
    """How many points to the right each row is drawn: rows of the same costs stand side by side."""
    groups = {row: [r for r, c in costs.items() if c == spent] for row, spent in costs.items()}
    return {row: BESIDE * (rows.index(row) - (len(rows) - 1) / 2) for row, rows in groups.items()}


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


def _tick(column: Key) -> str:
    try:
        return (
            f"{column[0]}\n{100 * Pattern.parse(column[0]).density:.3g} %"
            if len(column) == 1
            else "\n".join(column)
        )
    except PatternError:
        return column[0]
