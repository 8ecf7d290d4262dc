"""Runs of any settings, divided so that no cell averages over what differs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pandas as pd

from nmrun.lab.report import captions, chosen
from nmrun.lab.report.labels import label
from nmrun.lab.report.tables import Run, Table, settings_apart

NONE: tuple[str, ...] = ()
MOST = 12  # parts that settings make; of more they are rows


@dataclass(frozen=True)
class Part:
    """Runs with their table, and the settings that tell them from the other parts."""

    runs: pd.DataFrame
    table: Table
    settings: dict[str, str]

    @property
    def title(self) -> str:
        said = [f"{key}={value}" for key, value in self.settings.items() if value != "-"]
        return "; ".join(filter(None, [captions.title(self.table), ", ".join(said)]))


def parts(options: argparse.Namespace) -> list[Part]:
    """Divide the runs by data set and model, and by whatever else would be averaged over.

    Settings of recipes (``recipe.decay``) become rows, all others parts of their own.

    Args:
        options: as of :func:`nmrun.lab.report.chosen.parts`.

    Returns:
        The parts, in order.

    Raises:
        ConfigError: as :func:`nmrun.lab.report.chosen.parts`.
    """
    runs = chosen.filtered(chosen.collected(options.paths), options.filter)
    rows, columns = (options.rows or "recipe").split(","), (options.cols or "sparsity").split(",")
    for key in (*rows, *columns):
        chosen.known(key, list(runs.columns), "key")
    groups = [key for key in ("dataset", "model") if key not in (*rows, *columns)]
    found = []
    for _, group in runs.groupby(groups) if groups else [("", runs)]:
        apart = _apart(group, [*rows, *columns])
        own = [key for key in apart if key.partition(".")[0] != "recipe"]
        combined = group[own].map(label).apply(tuple, axis=1) if own else None
        if combined is None or combined.nunique() > MOST:
            divided, further = [(NONE, group)], apart
        else:
            divided = list(group.groupby(combined, sort=False))
            further = [key for key in apart if key not in own]
        asked = argparse.Namespace(**vars(options))
        asked.filter, asked.rows = [], ",".join([*rows, *further])
        for values, part in divided:
            settings = {key: str(value) for key, value in zip(own, values, strict=False)}
            found += [
                Part(part, table, settings)
                for part, table in chosen.parts(asked, several=False, runs=part)
            ]
    return found


def _apart(runs: pd.DataFrame, keys: list[str]) -> list[str]:
    """The settings that differ between runs of one cell."""
    cells: dict[tuple[str, ...], list[Run]] = {}
    for run in runs.to_dict("records"):
        cells.setdefault(tuple(label(run[key]) for key in keys), []).append(run)
    return list(dict.fromkeys(key for cell in cells.values() for key in settings_apart(cell)))
