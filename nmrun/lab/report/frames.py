"""Runs and rows of plain data as DataFrames with types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nmrun.lab.report.labels import label
from nmrun.lab.words.identity import GROUPS

FIRST = ("dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "seed", "status")
LAST = ("seconds", "metric", "events", "commit", "id", "folder")
SAID = ("sparsity.n", "sparsity.m", "sparsity.v")  # in ``sparsity``


def of_runs(collected: pd.DataFrame) -> pd.DataFrame:
    """Runs in short.

    Args:
        collected: runs as of :func:`nmrun.lab.report.collect.collect`.

    Returns:
        The columns of ``FIRST``, the settings that differ, the metrics, then the columns of
        ``LAST``, typed by :func:`typed`. ``attrs["shared"]`` has the settings that do not differ.
    """
    settings = [
        key
        for key in collected.columns
        if key.partition(".")[0] in GROUPS
        and "." in key
        and not key.endswith(".name")
        and key not in SAID
    ]
    values = {key: collected[key][collected[key].map(label) != "-"] for key in settings}
    differing = [key for key in settings if values[key].map(label).nunique() > 1]
    metrics = [key for key in collected.columns if "/" in key]
    last = [key for key in LAST if key in collected]  # files of earlier versions have no events
    found = typed(collected[[*FIRST, *differing, *metrics, *last]])
    found.attrs["shared"] = {key: values[key].iloc[0] for key in settings if key not in differing}
    return found


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A DataFrame of dictionaries, typed by :func:`typed`."""
    # as objects, whole numbers stay whole beside rows without the key
    return typed(pd.DataFrame(rows, dtype=object))


def typed(objects: pd.DataFrame) -> pd.DataFrame:
    """Give each column of objects the type that its values have.

    Truth values are ``bool``, whole numbers ``int64``, other numbers ``float64``; with missing
    values ``boolean``, ``Int64`` and ``float64``, which is also the type of a column with missing
    values alone. Texts have pandas' type for them. A column of
    several kinds stays one of objects.
    """
    return objects.apply(_column) if len(objects.columns) else objects


def _column(column: pd.Series) -> pd.Series:
    values = column.dropna()
    kinds = {type(value) for value in values}
    whole = len(values) == len(column)
    if kinds == {bool}:
        return column.astype("bool" if whole else "boolean")
    if kinds == {int}:
        return column.astype("int64" if whole else "Int64")
    if kinds <= {int, float}:
        return column.astype("float64")
    return column.infer_objects()
