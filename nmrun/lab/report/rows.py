"""Runs as a CSV file, a row a run, from which every cell of a table can be computed again."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun.errors import ConfigError
from nmrun.lab.report import records
from nmrun.lab.report.labels import label
from nmrun.lab.runs import documents
from nmrun.lab.words.identity import completed
from nmrun.lab.words.schema import flatten

NEEDED = {"recipe", "sparsity", "seed", "status", "metric", "dataset", "model"}

LOCAL = {"folder", "output_dir", "resume", "force", "dry", "track", "seeds"}


def written(runs: pd.DataFrame) -> str:
    """Write runs as CSV: values as on a command line, what a run does not have empty.

    Args:
        runs: as of :func:`nmrun.lab.report.collect.collect`. What changes no result is left out: where
            the folders are, how the runs were tracked.
    """
    columns = [column for column in runs.columns if column.partition(".")[0] not in LOCAL]
    lines = [[_text(run[column]) for column in columns] for run in runs.to_dict("records")]
    return str(records.written([columns, *lines], "csv"))


def read(path: str | Path) -> list[dict[str, Any]]:
    """Read such a file.

    Returns:
        The runs as rows of :func:`nmrun.lab.report.collect.collect`, with the keys that came after the
        file was written; ``folder`` is the file's line.

    Raises:
        ConfigError: where it is not such a file.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            head, *lines = ([documents.neutral(text) for text in line] for line in csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: no file of runs: {error}") from None
    if missing := sorted(NEEDED - set(head)):
        raise ConfigError(f"{path}: no file of runs: it has no column {missing[0]}")
    wrong = [number for number, line in enumerate(lines, 2) if len(line) != len(head)]
    if wrong:
        raise ConfigError(f"{path}, line {wrong[0]}: {len(head)} values are needed")
    return [
        _completed({name: _value(text) for name, text in zip(head, line, strict=True)})
        | {"folder": f"{path}:{number}"}
        for number, line in enumerate(lines, 2)
    ]


def _completed(run: dict[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in run.items() if value == value}
    config: dict[str, Any] = {}
    for name, value in known.items():
        group, dot, key = name.partition(".")
        if dot:
            config.setdefault(group, {})[key] = value
    return {**run, **flatten(completed(config)), **known}


def _text(value: Any) -> str:
    return "" if isinstance(value, float) and math.isnan(value) else label(value)


def _value(text: str) -> Any:
    if text in ("", "null", "true", "false"):
        return {"": math.nan, "null": None, "true": True, "false": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text[1:] if text[:1] == "'" and text[1:].startswith(records.FORMULA) else text
