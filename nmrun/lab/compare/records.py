"""Tables for programs: CSV, JSON and Parquet with all digits, and DataFrames with types."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from nmrun.errors import ConfigError

FORMULA = ("=", "+", "-", "@", "\t", "\r")
Lines = list[list[Any]]  # the head, then a line for each cell or run


def written(lines: Lines, style: str) -> str | bytes:
    """Write lines as ``csv``, ``json`` (a list of objects) or ``parquet``; in CSV, texts that a
    spreadsheet would take for formulas have an apostrophe in front, and a list is its items with
    spaces between.

    Raises:
        ConfigError: for Parquet without pyarrow.
    """
    if style == "csv":
        out = io.StringIO()
        neutral = ([_no_formula(_joined(cell)) for cell in line] for line in lines)
        csv.writer(out, lineterminator="\n").writerows(neutral)
        return out.getvalue()
    head, *rest = lines
    if style == "json":
        records = [dict(zip(head, line, strict=True)) for line in rest]
        return json.dumps(records, indent=1, default=str) + "\n"
    frame = pd.DataFrame(rest, columns=head, dtype=object)
    packed = io.BytesIO()
    try:
        typed(frame.loc[:, ~frame.columns.duplicated()]).to_parquet(packed, index=False)
    except ImportError:
        raise ConfigError("--format parquet needs pyarrow: pip install 'nmrun[parquet]'") from None
    return packed.getvalue()


def _joined(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _no_formula(value: object) -> object:
    """A text that a spreadsheet would take for a formula, with the apostrophe that keeps it one."""
    if not isinstance(value, str) or value == "-" or not value.startswith(FORMULA):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def of_frame(runs: pd.DataFrame) -> Lines:
    """A line for each run, None for what it has not."""
    whole = runs.astype(object)
    return [list(runs.columns), *whole.where(pd.notna(whole), None).to_numpy().tolist()]


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A DataFrame of dictionaries, typed by :func:`typed`."""
    # as objects, whole numbers stay whole beside rows without the key
    return typed(pd.DataFrame(rows, dtype=object))


def typed(objects: pd.DataFrame) -> pd.DataFrame:
    """Give each column of objects the type that its values have.

    Truth values are ``bool``, whole numbers ``int64``, other numbers ``float64``; with missing
    values ``boolean``, ``Int64`` and ``float64``, which is also the type of a column with missing
    values alone. Texts have pandas' type for them. A column of several kinds stays one of objects.
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
