"""Run folders into one table of runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun.schema import flatten


def collect(paths: Sequence[str | Path]) -> pd.DataFrame:
    """One row for each ``result.json`` at or below ``paths``, once each; empty if there is none.

    Columns: ``status``, ``id``, ``folder``, ``seconds``, ``commit``, ``metric`` (the task's own), ``seed``; the config's groups by name (``recipe``,
    ``model``, ...; ``sparsity`` as ``2:4`` or ``dense``) and every dotted key (``optimizer.lr``; lists as text); the final
    metrics (``test/accuracy``), and those of the best weights under ``best/`` (``best/test/accuracy``). What a run does not
    have is NaN. A file that is not a whole result is left out, and named in a line on standard error.
    """
    rows, seen = [], set()
    for file in (file for path in paths for file in sorted(Path(path).rglob("result.json"))):
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        try:
            rows.append(_row(json.loads(file.read_text(encoding="utf-8")), file.parent))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"nmrun: {file} left out, not a whole result ({type(error).__name__}: {error})", file=sys.stderr)
    return pd.DataFrame(rows, dtype=object)  # as objects, whole numbers stay whole beside runs without the key


def _row(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = result["config"]
    n, m = config["sparsity"]["n"], config["sparsity"]["m"]
    keys = {key: str(value).replace(" ", "") if isinstance(value, list) else value for key, value in flatten(config).items()}
    return {
        **keys,
        **{group: config[group]["name"] for group in ("dataset", "model", "recipe", "optimizer", "schedule")},
        "sparsity": "dense" if n is None else f"{n}:{m}",
        "seed": config["seed"],
        "status": result["status"],
        "id": result["id"],
        "folder": str(folder),
        "seconds": result.get("seconds"),
        "commit": result.get("environment", {}).get("commit"),
        "metric": result.get("metric"),
        **result["metrics"]["final"],
        **{f"best/{key}": value for key, value in result["metrics"]["best"].items()},
    }
