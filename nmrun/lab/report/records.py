"""Tables for programs: a line a cell or a line a run, as CSV, JSON or Parquet, with all digits."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

FORMULA = ("=", "+", "-", "@", "\t", "\r")
Lines = list[list[Any]]  # the head, then a line for each cell or run


def of_runs(runs: pd.DataFrame) -> Lines:
    """A line for each run: the columns of :func:`nmrun.lab.report.frames.of_runs`."""
    import pandas as pd

    whole = runs.astype(object)
    return [list(runs.columns), *whole.where(pd.notna(whole), None).to_numpy().tolist()]


def written(lines: Lines, style: str) -> str | bytes:
    """Write lines for another program.

    Texts that a spreadsheet would take for formulas have an apostrophe in front in CSV; a list is
    its items with spaces between there.

    Args:
        lines: the names of the columns, then the rows.
        style: ``csv``, ``json`` (a list of objects) or ``parquet``.

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
    import pandas as pd

    from nmrun.lab.report.frames import typed

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
