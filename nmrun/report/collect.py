"""Run folders into one table of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun.schema import flatten


def collect(paths: Sequence[Path]) -> tuple[pd.DataFrame, list[str]]:
    """One row for each ``result.json`` at or below ``paths``, and a line for each that could not be read.

    Columns: ``status``, ``id``, ``folder``, ``seconds``, ``commit``; the config's groups by name (``recipe``, ``sparsity`` as ``2:4`` or
    ``dense``, ``model``, ...) and every dotted key (``optimizer.lr``); the final metrics (``test/accuracy``), those of the
    best weights under ``best/`` (``best/test/accuracy``).
    """
    rows, unreadable = [], []
    for file in dict.fromkeys(f for path in paths for f in sorted(path.rglob("result.json"))):
        try:
            rows.append(_row(json.loads(file.read_text()), file.parent))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            unreadable.append(f"{file}: left out, not a result ({type(error).__name__}: {error})")
    return pd.DataFrame(rows), unreadable


def _row(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = result["config"]
    n, m = config["sparsity"]["n"], config["sparsity"]["m"]
    keys = {key: (str(value) if isinstance(value, list) else value) for key, value in flatten(config).items()}
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
        **result["metrics"]["final"],
        **{f"best/{key}": value for key, value in result["metrics"]["best"].items()},
    }
