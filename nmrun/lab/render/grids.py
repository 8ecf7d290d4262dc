"""A comparison as a table to be read: labels, and what each cell shows as printed. Every format for
readers writes this."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from nmrun.lab.compare.comparison import ALL, Comparison
from nmrun.lab.compare.notation import Key, interval, labelled, p_value, printed, short, words
from nmrun.lab.compare.overall import Overall, better
from nmrun.lab.compare.statistics import Cell, Difference
from nmrun.lab.compare.tables import ROW_COLUMNS, Table
from nmrun.lab.render import captions


@dataclass(frozen=True)
class Figure:
    """What a cell of a table shows, as printed: a value, its standard deviation, and the number of
    seeds or cells that these are over. ``star``: it differs from the baseline; the table of
    differences says so in Markdown."""

    value: str
    spread: str = ""
    counted: str = ""
    bold: bool = False
    star: bool = False

    @property
    def text(self) -> str:
        """``98.7 +- 0.3 (3, 2 failed)``."""
        spread = f" +- {self.spread}" if self.spread else ""
        return f"{self.value}{spread}" + (f" ({self.counted})" if self.counted else "")


Line = tuple[list[str], list[Figure]]


@dataclass(frozen=True)
class Grid:
    """A table to be read: its caption, ``keys`` columns of labels, then cells."""

    caption: list[str]
    keys: int
    head: list[str]
    lines: list[Line]


def grids(table: Table) -> list[Grid]:
    """The values, and where there is a baseline the differences to it."""
    head = [*table.row_keys, *(words(table.column_keys, column) for column in table.columns)]
    columns = [_head(table, column) for column in table.columns]
    with_units = [*table.row_keys, *columns, *ROW_COLUMNS]
    keys, values = len(table.row_keys), lines(table, _named, "paper")
    shown = [Grid(captions.caption(table), keys, with_units, values)]
    if not table.baseline:
        return shown
    compared = [
        (list(map(short, row)), [_difference(table, row, column) for column in table.columns])
        for row in table.rows
        if row not in table.baseline
    ]
    return [*shown, Grid(captions.comparison(table), keys, head, compared)]


def _head(table: Table, column: Key) -> str:
    pairs = zip(table.column_keys, column, strict=True)
    return words(
        table.column_keys, tuple(labelled(text) if key == "metric" else text for key, text in pairs)
    )


def lines(table: Table, name: Callable[[str, str], str], published: str) -> list[Line]:
    """The rows of a table. ``name`` writes a label of a key, and ``published`` marks the rows of
    figures that others have published."""
    every: list[Line] = []
    for row, others in table.with_paper:
        labels = [name(*pair) for pair in zip(table.row_keys, row, strict=True)]
        beside = [Figure("-" if others else str(of(table, row))) for of in ROW_COLUMNS.values()]
        if others:
            labels[-1] += f" ({published})"
            figures = [Figure(text) for text in table.published(row)]
        else:
            figures = [_figure(table, row, column) for column in table.columns]
        every.append((labels, figures + beside))
    return every


def _named(key: str, label: str) -> str:
    return labelled(label) if key == "metric" else short(label)


def _figure(table: Table, row: Key, column: Key) -> Figure:
    """Mean and standard deviation, the number of seeds that they are over, and what gave no value.
    One without runs is ``-``."""
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    metric = table.metric_of(row, column)
    if cell.mean is None:
        return Figure(cell.counted() or "-")
    decimals = table.digits_of((row, column), cell.mean, cell.sd)
    counted = decimals is None and metric.startswith("flops/")  # all runs have the same
    gap = table.differences.get((row, column))
    return Figure(
        printed(cell.mean, metric, decimals),
        spread="" if cell.sd is None or counted else printed(cell.sd, metric, decimals),
        counted=cell.counted(),
        bold=(row, column) in table.best,
        star=gap is not None and gap.significant,
    )


def _difference(table: Table, row: Key, column: Key) -> Figure:
    gap = table.differences.get((row, column))
    if gap is None:
        return Figure("-")
    return _judged(gap, table.metric_of(row, column), gap.n)


def _judged(gap: Difference, metric: str, count: int) -> Figure:
    """``-0.5 [-0.9, -0.1] p=0.012* (5)``: difference, interval, p-value with a star where it is
    significant, and over how many seeds or cells."""
    written = interval(gap.mean, gap.low, gap.high, metric, gap.error)
    return Figure(f"{written}{p_value(gap.p)}{'*' if gap.significant else ''}", counted=str(count))


def over_all_cells(comparison: Comparison) -> Grid:
    """A row's differences to the baseline: of each data set, and over all of them."""
    rows, tables = comparison.overall, comparison.tables
    every = list(dict.fromkeys(data for each in rows for data in each.parts))
    several = len(every) > 1
    columns: dict[str, Callable[[Overall], Figure]] = {
        "better in": lambda each: Figure(f"{better(each.means)} of {len(each.means)}")
    }
    if any(each.failed for each in rows):
        columns["failed"] = lambda each: Figure(f"{each.failed} of {each.runs}")
    columns["median cell"] = lambda each: Figure(_plain(each, each.median))
    for data in every:
        columns[data if several else ALL] = functools.partial(_part, data=data)
    if several:
        columns[ALL] = lambda each: Figure(_plain(each, each.mean))
        columns["but for one data set"] = lambda each: Figure(_ends(each))
    keys = tables[0].row_keys
    written: list[Line] = [
        (list(map(short, each.row)), [figure(each) for figure in columns.values()]) for each in rows
    ]
    above = captions.over_all_cells(rows, tables, several)
    return Grid(above, len(keys), [*keys, *columns], written)


def _part(each: Overall, data: str) -> Figure:
    if data not in each.parts:
        return Figure("-")
    part = each.parts[data]
    return _judged(part.gap, "", len(part.means))


def _plain(each: Overall, value: float) -> str:
    error = max(part.gap.error for part in each.parts.values())
    return interval(value, None, None, "", error)


def _ends(each: Overall) -> str:
    """The least and the largest mean over all data sets but one, which is named."""
    ends = sorted((value, data) for data, value in each.all_but.items())
    return (
        " to ".join(f"{_plain(each, value)} ({data})" for value, data in ends[:1] + ends[-1:])
        or "-"
    )
