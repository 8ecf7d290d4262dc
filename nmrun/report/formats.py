"""Tables to be read: Markdown, LaTeX and HTML. ``records`` has those for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nmrun.config.metric import higher_is_better
from nmrun.report.captions import caption, comparison
from nmrun.report.labels import Key, short, words
from nmrun.report.latex import latex
from nmrun.report.markdown import plain
from nmrun.report.markdown import table as aligned
from nmrun.report.numbers import deviates, interval, labelled, p_value, places, printed
from nmrun.report.pages import document, filled
from nmrun.report.statistics import Cell, shown
from nmrun.report.tables import Table

Line = tuple[list[str], list[tuple[str, bool]]]


@dataclass(frozen=True)
class Grid:
    """A table as text: ``keys`` columns of labels, then cells, each with whether it stands out."""

    caption: str
    keys: int
    head: list[str]
    lines: list[Line]


def render(tables: Sequence[Table], style: str, labels: Mapping[str, str] | None = None) -> str:
    """Write tables down.

    Args:
        tables: of one metric.
        style: ``markdown``, ``latex`` or ``html`` (one page).
        labels: the user's names, for LaTeX.

    Returns:
        The text; ASCII, but for minus signs and the users' own names.
    """
    if style == "latex":
        return "\n".join(latex(table, labels) for table in tables)
    drawn = [grid for table in tables for grid in grids(table)]
    if style == "html":
        body = Markup("").join(map(html_table, drawn))
        return document("page.html", title=f"nmrun: {tables[0].metric}", body=body)
    return "\n".join(map(markdown, drawn))


def grids(table: Table) -> list[Grid]:
    """The values, and where there is a baseline the differences to it."""
    head = [*table.row_keys, *(words(table.column_keys, column) for column in table.columns)]
    with_units = [*table.row_keys, *(_headed(table, column) for column in table.columns)]
    lines = [
        (
            _labels(table, row, labelled),
            [(text(table, row, column), (row, column) in table.best) for column in table.columns],
        )
        for row in table.rows
    ]
    found = [Grid(caption(table), len(table.row_keys), with_units, _with_paper(table, lines))]
    if table.baseline:
        others = [row for row in table.rows if row not in table.baseline]
        compared = [
            (
                _labels(table, row, str),
                [_difference(table, row, column) for column in table.columns],
            )
            for row in others
        ]
        found.append(Grid(comparison(table), len(table.row_keys), head, compared))
    return found


def _labels(table: Table, row: Key, metric: Callable[[str], str]) -> list[str]:
    """The labels of a row; a metric as ``metric`` writes it."""
    pairs = zip(table.row_keys, row, strict=True)
    return [metric(label) if key == "metric" else short(label) for key, label in pairs]


def _headed(table: Table, column: Key) -> str:
    """The labels of a column; a metric with its unit."""
    pairs = zip(table.column_keys, column, strict=True)
    return words(
        table.column_keys, tuple(labelled(text) if key == "metric" else text for key, text in pairs)
    )


def _with_paper(table: Table, lines: list[Line]) -> list[Line]:
    """Published figures below the row that they are to be compared with; at the end, those that we
    have no row for.
    """
    names, columns = (
        [" ".join(row) for row in table.rows],
        [" ".join(column) for column in table.columns],
    )

    def published(name: str) -> Line:
        labels = name.split()
        return [*labels[:-1], f"{labels[-1]} (paper)"], [
            (table.paper[name].get(column, "-"), False) for column in columns
        ]

    found = []
    for name, line in zip(names, lines, strict=True):
        found += [line, published(name)] if name in table.paper else [line]
    return found + [published(name) for name in table.paper if name not in names]


def markdown(grid: Grid) -> str:
    """Aligned for a terminal too; what stands out is bold."""
    lines = [
        [*labels, *(f"**{cell}**" if out else cell for cell, out in cells)]
        for labels, cells in grid.lines
    ]
    return f"{plain(grid.caption)}\n\n{aligned(grid.head, lines)}\n"


def html_table(grid: Grid) -> Markup:
    """The caption and a ``table`` element, which scrolls by itself where the page is narrow."""
    return filled("table.html", grid=grid)


def text(table: Table, row: Key, column: Key) -> str:
    """Write a cell as ``98.7 +- 0.3 (3)``: mean, standard deviation, number of runs; then what gave
    no value, as ``failed (1)``.

    Args:
        table: the table.
        row, column: the cell's place; one without runs is ``-``.
    """
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    parts, metric = [], table.metric_of(row, column)
    value = shown(cell, table.statistic, higher_is_better(metric))
    if value is not None and cell.sd is not None and table.statistic == "mean":
        # without a spread, both as a single value is printed
        at = places(value, metric, cell.sd) if deviates(value, cell.sd) else None
        counted = at is None and metric.startswith("flops/")  # all runs have the same
        spread = "" if counted else f" +- {printed(cell.sd, metric, at)}"
        parts.append(f"{printed(value, metric, at)}{spread} ({cell.n})")
    elif value is not None:
        parts.append(f"{printed(value, metric)} ({cell.n})")
    parts += [f"{reason} ({count})" for reason, count in cell.without.items()]
    return ", ".join(parts) or "-"


def _difference(table: Table, row: Key, column: Key) -> tuple[str, bool]:
    """``-0.5 [-0.9, -0.1] p=0.012 (5)``: difference, its interval, p-value, number of common seeds;
    whether it is significant.
    """
    gap, metric = table.differences.get((row, column)), table.metric_of(row, column)
    if gap is None:
        return "-", False
    error = (gap.spread or 0.0) / math.sqrt(gap.n)
    written = interval(gap.mean, gap.low, gap.high, metric, error)
    return f"{written}{p_value(gap.p)} ({gap.n})", gap.significant
