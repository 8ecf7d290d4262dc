"""Tables as Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmrun.config.metric import higher_is_better
from nmrun.report.captions import caption, comparison
from nmrun.report.markdown import plain
from nmrun.report.markdown import table as aligned
from nmrun.report.numbers import MINUS, NEGLIGIBLE, places, printed, signed
from nmrun.report.statistics import Cell, shown
from nmrun.report.tables import Key, Table

FORMULA = ("=", "+", "-", "@", "\t", "\r")
LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", **{c: f"\\{c}" for c in "_%&#${}"}, MINUS: "$-$",
}  # fmt: skip
STYLE = (
    ":root{color-scheme:light dark}body{font:15px sans-serif;margin:2em}"
    ".wide{overflow-x:auto;margin-bottom:2em}table{border-collapse:collapse}"
    "h1,code{overflow-wrap:anywhere}th,td{padding:.3em .9em;text-align:right;white-space:nowrap}"
    "tbody th,th.key{text-align:left}thead th{border-bottom:1px solid}tbody th{font-weight:normal}"
    "img{max-width:100%;background:white}figure{margin:0 0 2em}dt{margin-top:1em}"
)


Line = tuple[list[str], list[tuple[str, bool]]]


@dataclass(frozen=True)
class Grid:
    """A table as text: ``keys`` columns of labels, then cells, each with whether it stands out."""

    caption: str
    keys: int
    head: list[str]
    lines: list[Line]


def render(tables: Sequence[Table], style: str) -> str:
    """``markdown``, ``latex``, ``csv`` (long: one line a cell, full precision) or ``html`` (one
    page); ASCII, but for minus signs and the users' own names.
    """
    if style == "csv":
        return as_csv(tables)
    drawn = [grid for table in tables for grid in grids(table)]
    if style == "html":
        return page(f"nmrun: {tables[0].metric}", "".join(map(html_table, drawn)))
    return "\n".join((latex if style == "latex" else markdown)(grid) for grid in drawn)


def grids(table: Table) -> list[Grid]:
    """The values, and where there is a baseline the differences to it."""
    head = [*table.row_keys, *(" ".join(column) for column in table.columns)]
    lines = [
        (
            list(row),
            [(text(table, row, column), (row, column) in table.best) for column in table.columns],
        )
        for row in table.rows
    ]
    found = [Grid(caption(table), len(table.row_keys), head, _with_paper(table, lines))]
    if table.baseline:
        others = [row for row in table.rows if row not in table.baseline]
        compared = [
            (list(row), [_difference(table, row, column) for column in table.columns])
            for row in others
        ]
        found.append(Grid(comparison(table), len(table.row_keys), head, compared))
    return found


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


def latex(grid: Grid) -> str:
    """A ``table`` environment; needs the package booktabs."""

    def escape(value: str) -> str:
        return "".join(LATEX.get(c, c) for c in value.replace("+-", "\0")).replace("\0", r"$\pm$")

    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escape(grid.caption)}}}"]
    lines += [
        rf"\begin{{tabular}}{{{'l' * grid.keys}{'r' * (len(grid.head) - grid.keys)}}}",
        r"\toprule",
    ]
    lines += [" & ".join(map(escape, grid.head)) + r" \\", r"\midrule"]
    for labels, cells in grid.lines:
        values = [rf"\textbf{{{escape(cell)}}}" if out else escape(cell) for cell, out in cells]
        lines.append(" & ".join([*map(escape, labels), *values]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def as_csv(tables: Sequence[Table]) -> str:
    """Columns: what tells the tables apart, the keys of row and column, metric, mean, sd, n, best
    (0 or 1), without (runs that gave no value), median, and with a baseline the difference to it,
    its interval, p-value and the smallest that could have been shown.

    A dense reference is one line, not one for each ratio. Empty: undefined.
    """
    out = io.StringIO()
    lines = ([_no_formula(cell) for cell in line] for line in cell_by_cell(tables))
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def cell_by_cell(tables: Sequence[Table]) -> list[list[Any]]:
    """The lines of :func:`as_csv`, its head first."""
    groups = [
        key
        for key in ("dataset", "model")
        if key not in (*tables[0].row_keys, *tables[0].column_keys)
    ]
    keys = [*groups, *tables[0].row_keys, *tables[0].column_keys]
    compared = ["difference", "low", "high", "p", "least"] if tables[0].baseline else []
    lines: list[list[Any]] = [
        [*keys, "metric", "mean", "sd", "n", "best", "without", "median", *compared]
    ]
    for table in tables:
        group = [table.shared[key] for key in groups]
        for row in table.rows:
            for column in table.columns[:1] if row in table.references else table.columns:
                cell = table.cells.get((row, column))
                if cell is not None:
                    ratio: Key = ("dense",) if row in table.references else column
                    best, without = int((row, column) in table.best), sum(cell.without.values())
                    gap = table.differences.get((row, column))
                    found = (
                        [gap.mean, gap.low, gap.high, gap.p, gap.least]
                        if gap is not None
                        else [None] * len(compared)
                    )
                    metric, numbers = (
                        table.metric_of(row, column),
                        [cell.mean, cell.sd, cell.n, best, without, cell.median],
                    )
                    lines.append([*group, *row, *ratio, metric, *numbers, *found])
    return lines


def _no_formula(value: object) -> object:
    """A text that a spreadsheet would take for a formula, with the apostrophe that keeps it one."""
    if not isinstance(value, str) or value == "-" or not value.startswith(FORMULA):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def html_table(grid: Grid) -> str:
    """The caption and a ``table`` element, which scrolls by itself where the page is narrow."""

    def escape(value: str) -> str:
        return html.escape(value).replace("+-", "&plusmn;").replace(MINUS, "&minus;")

    head = "".join(f'<th class="key">{escape(key)}</th>' for key in grid.head[: grid.keys])
    head += "".join(f"<th>{escape(column)}</th>" for column in grid.head[grid.keys :])
    body = ""
    for labels, cells in grid.lines:
        body += "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in labels)
        body += (
            "".join(
                f"<td><b>{escape(cell)}</b></td>" if out else f"<td>{escape(cell)}</td>"
                for cell, out in cells
            )
            + "</tr>\n"
        )
    return (
        f'<p>{escape(grid.caption)}</p>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}'
        "</tbody></table></div>\n"
    )


def page(title: str, body: str) -> str:
    """A whole HTML document, with all that it needs in it."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body>\n{body}</body></html>\n"
    )


def text(table: Table, row: Key, column: Key) -> str:
    """``98.7 +- 0.3 (3)``: mean, standard deviation, number of runs; then what gave no value, as
    ``failed (1)``.
    """
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    parts, metric = [], table.metric_of(row, column)
    value = shown(cell, table.statistic, higher_is_better(metric))
    if value is not None and cell.sd is not None and table.statistic == "mean":
        # without a spread, both as a single value is printed
        at = places(value, metric, cell.sd) if cell.sd > NEGLIGIBLE * abs(value) else None
        parts.append(f"{printed(value, metric, at)} +- {printed(cell.sd, metric, at)} ({cell.n})")
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
    # as many digits as the mean's standard error has
    at = places(gap.mean, metric, (gap.spread or 0.0) / math.sqrt(gap.n))
    ends = [signed(end, metric, at) for end in (gap.low, gap.high) if end is not None]
    interval = f" [{', '.join(ends)}]" if ends else ""
    p = "" if gap.p is None else " p<0.001" if gap.p < 0.001 else f" p={gap.p:.2g}"
    return f"{signed(gap.mean, metric, at)}{interval}{p} ({gap.n})", gap.significant
