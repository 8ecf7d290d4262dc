"""Runs compared: which ones, folded into tables, each row against a baseline.

::

    runs = read_runs(["outputs/digits"])
    text = render(compare(runs, Query(baseline="dense")), "markdown")
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from nmrun.errors import ConfigError
from nmrun.lab.compare.differences import Overall, against, better, over_all_cells
from nmrun.lab.compare.notation import Key
from nmrun.lab.compare.runs import (
    Lines,
    check_name,
    filtered,
    metrics_and_keys,
    usual_metric,
    verify,
)
from nmrun.lab.compare.statistics import Difference
from nmrun.lab.compare.tables import ROW_COLUMNS, Table, build, by_place, settings_apart

Keys = str | Sequence[str] | None
GROUPS = ("dataset", "model")  # of which each has a table, unless they are rows or columns
ALL = "all cells"
ALL_BUT = "all but"


@dataclass(frozen=True)
class Query:
    """A question about runs.

    ``rows`` and ``cols`` are config keys, or ``metric`` where there are several ``metrics`` (by
    default that of the task). ``filter`` has conditions ``KEY=VALUE`` or ``KEY!=VALUE``.
    ``baseline`` is the row that others are compared with, by a moderated t-test; ``overall``: over
    all cells of each data set as well."""

    rows: tuple[str, ...] = ("recipe",)
    cols: tuple[str, ...] = ("sparsity",)
    metrics: tuple[str, ...] = ()
    filter: tuple[str, ...] = ()
    baseline: str = ""
    overall: bool = False

    @classmethod
    def of(
        cls,
        rows: Keys = None,
        cols: Keys = None,
        metric: Keys = None,
        filter: Sequence[str] = (),
        baseline: str | None = None,
        overall: bool = False,
    ) -> Query:
        """As a command or a call has it: names with commas between, or a sequence of such texts."""
        rows, cols = keys(rows) or cls.rows, keys(cols) or cls.cols
        return cls(rows, cols, keys(metric), tuple(filter), baseline or "", overall)

    def __post_init__(self) -> None:
        if not self.overall:
            return
        if not self.baseline:
            raise ConfigError(
                "over all cells each row is compared with one of them: name it with --baseline"
            )
        if "metric" in (*self.rows, *self.cols):
            raise ConfigError("--overall: one metric at a time, which is no row or column")


def keys(names: Keys) -> tuple[str, ...]:
    """Names separated by commas, or a sequence of such texts; repeated names count once."""
    text = names if isinstance(names, str) else ",".join(names or ())
    return tuple(dict.fromkeys(text.split(","))) if text else ()


@dataclass(frozen=True)
class Comparison:
    """A table for each data set and model; and where asked for, the rows over all cells."""

    tables: list[Table]
    overall: list[Overall] = field(default_factory=list)

    @property
    def data_sets(self) -> list[str]:
        """Those of the rows over all cells, in order."""
        return list(dict.fromkeys(data for each in self.overall for data in each.parts))


def compare(runs: pd.DataFrame, query: Query, intact: bool = False) -> Comparison:
    """Compare the runs that a query is about; ``intact`` refuses changed files.

    Raises ConfigError for an unknown key, metric, condition or baseline, and where no run is left.
    Likewise where a cell would average over runs that differ in more than their seed.
    """
    _check(runs, query)
    runs = filtered(runs, query.filter)
    if intact:
        verify(runs)
    tables = []
    for part in _groups(runs, query):
        metric = ",".join(query.metrics) or usual_metric(part)
        table = build(part, metric, query.rows, query.cols)
        tables.append(against(table, query.baseline) if query.baseline else table)
    return Comparison(tables, over_all_cells(tables, query.baseline) if query.overall else [])


def _check(runs: pd.DataFrame, query: Query) -> None:
    metrics, settings = metrics_and_keys(runs)
    for key in (*query.rows, *query.cols):
        check_name(key, settings, "key")
    # without a finished run the metrics are not known, but failures can be shown
    if (runs["status"] == "finished").any():
        for metric in query.metrics:
            check_name(metric, metrics, "metric")
    if len(query.metrics) > 1 and "metric" not in (*query.rows, *query.cols):
        raise ConfigError(
            f"--metric {','.join(query.metrics)}: several metrics need a place: --cols metric, say, with --rows recipe,sparsity"
        )


def one_metric(query: Query) -> None:
    """Raise ConfigError for several."""
    if len(query.metrics) > 1:
        raise ConfigError(f"--metric {','.join(query.metrics)}: one at a time")


def _groups(runs: pd.DataFrame, query: Query) -> list[pd.DataFrame]:
    keys = [key for key in GROUPS if key not in (*query.rows, *query.cols)]
    return [part for _, part in runs.groupby(keys, dropna=False)] if keys else [runs]


def divide(runs: pd.DataFrame, query: Query) -> list[Table]:
    """Compare runs of any settings: by data set and model, with a row for each value of whatever
    else would be averaged over."""
    one_metric(query)
    _check(runs, query)
    tables = []
    for group in _groups(filtered(runs, query.filter), query):
        cells = by_place(group.to_dict("records"), query.rows, query.cols)
        apart = dict.fromkeys(key for cell in cells.values() for key in settings_apart(cell))
        tables += compare(group, replace(query, filter=(), rows=(*query.rows, *apart))).tables
    return tables


# --- for programs ---------------------------------------------------------------------------------


def lines(comparison: Comparison) -> Lines:
    """A head, then a line for each cell. A comparison over all cells has a line for each row and
    data set instead; for several data sets also one for each row and ``all cells``, and with each
    left out, ``all but text``. None stands for an undefined value.

    ``best`` is 0 or 1. ``without`` counts the runs that gave no value. ``least`` is the smallest
    difference that could have been shown. A dense reference has one line, not one for each ratio.
    Over all cells, ``better`` counts those in which a row is better, and ``difference`` is in
    standard deviations of a run.
    """
    tables = comparison.tables
    if comparison.overall:
        return _of_rows(comparison.overall, tables[0].row_keys)
    table_keys = (*tables[0].row_keys, *tables[0].column_keys)
    groups = [key for key in GROUPS if key not in table_keys]
    compared = any(table.baseline for table in tables)  # an experiment's may be in some alone
    figures, cells = dict[str, Any](), []
    for table in tables:
        group = [table.shared[key] for key in groups]
        for row in table.rows:
            for labels, column in table.columns_of(row):
                if (row, column) not in table.cells:
                    continue
                figures = _of_cell(table, row, column, compared)
                metric = table.metric_of(row, column)
                cells.append([*group, *row, *labels, metric, *figures.values()])
    return [[*groups, *table_keys, "metric", *figures], *cells]


def _of_cell(table: Table, row: Key, column: Key, compared: bool) -> dict[str, Any]:
    cell = table.cells[row, column]
    gap = _of_gap(table.differences.get((row, column))) if compared else {}
    return {
        "mean": cell.mean,
        "sd": cell.sd,
        "n": cell.n,
        "best": int((row, column) in table.best),
        "without": sum(cell.without.values()),
        "median": cell.median,
        "seeds": list(cell.values),
        "values": list(cell.values.values()),
        **gap,
        **{name: of(table, row) for name, of in ROW_COLUMNS.items()},
    }


def _of_gap(gap: Difference | None) -> dict[str, float | None]:
    names = {"difference": "mean", **{name: name for name in ("low", "high", "p", "least")}}
    return {name: getattr(gap, field, None) for name, field in names.items()}


def _of_rows(rows: Sequence[Overall], keys: Key) -> Lines:
    figures, lines = dict[str, Any](), []
    for row in rows:
        by_data = {data: (part.means, part.gap) for data, part in row.parts.items()}
        if row.all_but:
            by_data[ALL] = row.means, Difference(row.mean, 0)
        for left_out, mean in row.all_but.items():
            rest = [m for data, part in row.parts.items() if data != left_out for m in part.means]
            by_data[f"{ALL_BUT} {left_out}"] = rest, Difference(mean, 0)
        for data, (means, gap) in by_data.items():
            figures = {
                "cells": len(means),
                "better": better(means),
                "median": statistics.median(means),
                **_of_gap(gap),
                "freedom": gap.freedom,
            }
            lines.append([*row.row, data, *figures.values()])
    return [[*keys, "dataset", *figures], *lines]
