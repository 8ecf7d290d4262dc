"""Comparisons written down: Markdown, LaTeX and HTML to be read, the formats of ``records`` for
programs. HTML is whole documents, which ask no other host or file for anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nmrun.lab.compare import names, records
from nmrun.lab.compare.comparison import ALL, Comparison, lines
from nmrun.lab.compare.names import Key, short, words
from nmrun.lab.compare.numbers import MINUS, interval, labelled, p_value, printed
from nmrun.lab.compare.overall import Mean, Overall, better, mean
from nmrun.lab.compare.statistics import Cell, shown
from nmrun.lab.compare.tables import Table
from nmrun.lab.show import captions
from nmrun.lab.show.latex import environment, escape, latex
from nmrun.lab.show.markdown import plain
from nmrun.lab.show.markdown import table as aligned
from nmrun.lab.words.metric import higher_is_better

READABLE = ("markdown", "latex", "html")
METHOD = (
    "The unit of a cell is the median over the other rows of its column, corrected for the bias of so few seeds; "
    "intervals hold for the units found. Every cell counts alike. Seeds of one data set are observations, and their "
    "spread is that of the data set. Failed seeds are in no difference. Tests are two-sided."
)
Line = tuple[list[str], list[tuple[str, bool]]]


@dataclass(frozen=True)
class Grid:
    """A table as text: the lines of its caption, ``keys`` columns of labels, then cells, each with
    whether it is bold; ``method`` says how the numbers come about.
    """

    caption: list[str]
    keys: int
    head: list[str]
    lines: list[Line]
    method: str = ""


def render(
    comparison: Comparison,
    style: str,
    labels: Mapping[str, str] | None = None,
    method: bool = False,
) -> str | bytes:
    """Write a comparison down: its tables, or where it is over all cells, that.

    Args:
        style: ``markdown``, ``latex``, ``html`` (one page), or for programs ``csv``, ``json`` and
            ``parquet``, which is bytes.
        method: say in Markdown below each table how its numbers come about, as HTML always does.

    Returns:
        The text; ASCII, but for minus signs and the users' own names.

    Raises:
        ConfigError: for Parquet without pyarrow.
    """
    if style not in READABLE:
        return records.written(lines(comparison), style)
    tables, title = comparison.tables, f"nmrun: {comparison.tables[0].metric}"
    if comparison.overall:
        drawn, title = [_over_all_cells(comparison)], "nmrun: all cells together"
    else:
        drawn = [grid for table in tables for grid in grids(table)]
    if style == "latex" and comparison.overall:
        return _latex(drawn[0], labels)
    if style == "latex":
        return "\n".join(latex(table, labels) for table in tables)
    if style == "html":
        return document("page.html", title=title, body=Markup("").join(map(html_table, drawn)))
    return "\n".join(markdown(grid, method) for grid in drawn)


def grids(table: Table) -> list[Grid]:
    """The values, and where there is a baseline the differences to it."""
    head = [*table.row_keys, *(words(table.column_keys, column) for column in table.columns)]
    with_units = [*table.row_keys, *(_headed(table, column) for column in table.columns)]
    keys, values = len(table.row_keys), [_values(table, *line) for line in table.with_paper]
    if not table.baseline:
        return [Grid(captions.caption(table), keys, with_units, values, captions.method(table))]
    compared = [
        (_labels(table, row, str), [_difference(table, row, column) for column in table.columns])
        for row in table.rows
        if row not in table.baseline
    ]
    return [
        Grid(captions.caption(table), keys, with_units, values),
        Grid(captions.comparison(table), keys, head, compared, captions.method(table)),
    ]


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


def _values(table: Table, row: Key, published: bool) -> Line:
    if published:
        return [*row[:-1], f"{row[-1]} (paper)"], [
            (figure, False) for figure in table.published(row)
        ]
    cells = [(text(table, row, column), (row, column) in table.best) for column in table.columns]
    return _labels(table, row, labelled), cells


def markdown(grid: Grid, method: bool = False) -> str:
    """Aligned for a terminal too; with ``method``, how the numbers come about stands below."""
    lines = [
        [*labels, *(f"**{cell}**" if out else cell for cell, out in cells)]
        for labels, cells in grid.lines
    ]
    below = f"\n{plain(grid.method)}\n" if method and grid.method else ""
    above = "\n".join(map(plain, grid.caption))
    return f"{above}\n\n{aligned(grid.head, lines)}\n{below}"


def html_table(grid: Grid) -> Markup:
    """The caption and a ``table`` element, which scrolls by itself where the page is narrow."""
    return filled("table.html", grid=grid)


def text(table: Table, row: Key, column: Key) -> str:
    """Write a cell as ``98.7 +- 0.3 (3)``: mean, standard deviation and number of the seeds that they
    are over; beside it what gave no value, as in ``98.7 +- 0.3 (3, 2 failed)``. One without runs is
    ``-``.
    """
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    metric = table.metric_of(row, column)
    value = shown(cell, table.statistic, higher_is_better(metric))
    if value is not None and cell.sd is not None and table.statistic == "mean":
        at = table.digits_of(value, metric, cell.sd)
        counted = at is None and metric.startswith("flops/")  # all runs have the same
        spread = "" if counted else f" +- {printed(cell.sd, metric, at)}"
        return f"{printed(value, metric, at)}{spread} ({cell.counted()})"
    if value is not None:
        return f"{printed(value, metric, table.digits_of(value, metric, None))} ({cell.counted()})"
    return cell.counted() or "-"


def _difference(table: Table, row: Key, column: Key) -> tuple[str, bool]:
    """``-0.5 [-0.9, -0.1] p=0.012* (5)``: difference, its interval, p-value with a star where it is
    significant, number of common seeds. Nothing is bold.
    """
    gap, metric = table.differences.get((row, column)), table.metric_of(row, column)
    if gap is None:
        return "-", False
    error = (gap.spread or 0.0) / math.sqrt(gap.n)
    written = interval(gap.mean, gap.low, gap.high, metric, error, table.digits)
    return f"{written}{p_value(gap.p)}{'*' * gap.significant} ({gap.n})", False


# --- over all cells -------------------------------------------------------------------------------


def _over_all_cells(comparison: Comparison) -> Grid:
    rows, tables = comparison.overall, comparison.tables
    keys = tables[0].row_keys
    every = list(dict.fromkeys(data for each in rows for data in each.parts))
    apart = every if len(every) > 1 else []
    fails = any(each.failed for each in rows)
    written = [
        (
            [short(label) for label in each.row],
            [
                (f"{better(each.means)} of {len(each.means)}", False),
                *[(f"{each.failed} of {each.runs}", False)] * fails,
                (interval(each.median, None, None, "", each.mean.error), False),
                *((_part(each, data), False) for data in apart),
                (_mean(each.mean) + p_value(each.mean.p) + "*" * each.mean.significant, False),
            ],
        )
        for each in rows
    ]
    return Grid(
        captions.over_all_cells(rows, tables, apart),
        len(keys),
        [*keys, "better in", *["failed"] * fails, "median cell", *apart, ALL],
        written,
        METHOD,
    )


def _part(each: Overall, data: str) -> str:
    if data not in each.parts:
        return "-"
    part = each.parts[data]
    return f"{_mean(mean([part]))} ({len(part.means)})"


def _mean(gap: Mean) -> str:
    return interval(gap.value, gap.low, gap.high, "", gap.error)


def _latex(drawn: Grid, aliases: Mapping[str, str] | None) -> str:
    def cell(text: str) -> str:
        return escape(text).replace("*", "$^{*}$")

    def label(text: str) -> str:
        return escape(names.written(text, aliases))

    head = [label({"recipe": "Recipe"}.get(text, text)) for text in drawn.head]
    body = [
        [*map(label, labels), *(cell(text) for text, _ in cells)] for labels, cells in drawn.lines
    ]
    caption = escape(". ".join(line[:1].upper() + line[1:] for line in drawn.caption))
    return environment([drawn.method], f"{caption}.", "overall", [head, *body], drawn.keys)


@functools.cache
def _templates() -> jinja2.Environment:
    """Whatever users wrote becomes text."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["signs"] = lambda text: text.replace("+-", "\N{PLUS-MINUS SIGN}")
    return made


def filled(template: str, **values: Any) -> Markup:
    """A template with its values, of which texts are escaped and :class:`markupsafe.Markup` is not;
    ASCII, but for what stands in scripts.
    """
    text = _templates().get_template(template).render(allowed="", **values)
    return Markup(text.replace(MINUS, "&minus;").replace("\N{PLUS-MINUS SIGN}", "&plusmn;"))


def document(template: str, **values: Any) -> str:
    """As :func:`filled`, with all other characters as ASCII too."""
    return filled(template, **values).encode("ascii", "xmlcharrefreplace").decode()
