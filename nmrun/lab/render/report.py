"""``nmrun report``: one HTML file with everything about some runs."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd

from nmrun import atomic
from nmrun.errors import ConfigError
from nmrun.lab.compare import notation
from nmrun.lab.compare.comparison import Query, divide
from nmrun.lab.compare.differences import against
from nmrun.lab.compare.notation import label, short
from nmrun.lab.compare.runs import FIRST, filtered, read_runs, summary
from nmrun.lab.compare.tables import Table
from nmrun.lab.records import settings, status
from nmrun.lab.records.status import RunState
from nmrun.lab.render import captions, plots, style
from nmrun.lab.render.curves import History
from nmrun.lab.render.formats import Figure, Grid, grids
from nmrun.lab.runs.run_folder import RunFolders

TEMPLATE = Path(__file__).with_name("report.html")
MOST_LINES = 200  # at most so many lines of a list; the rest is counted


def write(paths: Sequence[str], query: Query, target: Path) -> None:
    """Write the report of the runs below ``paths``, whole or not at all.

    An empty baseline is dense, where there is such a row. Raises ConfigError for a baseline that no
    table has.
    """
    folders = RunFolders()
    collected = read_runs(paths, folders=folders)
    tables = divide(collected, replace(query, baseline=""))
    runs = pd.concat([table.runs for table in tables])
    every = [run for path in paths for run in status.runs(Path(path), folders)]
    states = _fitting({os.path.realpath(run.folder): run for run in every}, collected, query.filter)
    counts = Counter(run.state for run in states)
    counts.update(runs["status"][~runs["folder"].map(os.path.isdir)])  # of CSV files
    order = [*status.STATES, *sorted(set(counts) - set(status.STATES))]
    brief = summary(runs)
    keys = [k for k in map(str, brief) if k in FIRST or ("." in k and "/" not in k)]
    common = [(key, label(value)) for key, value in brief.attrs["shared"].items()]
    template = jinja2.Environment(
        autoescape=True,  # whatever users wrote becomes text
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        title=f"nmrun: {', '.join(paths)}",
        heading=", ".join(paths),
        made=time.strftime("%Y-%m-%d %H:%M"),
        counted=", ".join(f"{counts[state]} {state}" for state in order if counts[state]),
        command=shlex.join(["nmrun", *sys.argv[1:]]),
        sections=_sections(tables, query.baseline, folders),
        unfinished=[run for run in states if run.state != "finished"],
        run_keys=keys,
        run_metric=", ".join(dict.fromkeys(notation.labelled(table.metric) for table in tables)),
        runs=_runs(tables, keys, target, folders),
        common=_listed(common),
        environment=_listed(_environment(runs, folders)),
        most=MOST_LINES,
    )
    text = text.encode("ascii", "xmlcharrefreplace").decode()
    atomic.write(target, text, shared=True)


def _fitting(
    states: Mapping[str, RunState], collected: pd.DataFrame, conditions: Sequence[str]
) -> list[RunState]:
    """The runs, by their real paths, that fit the conditions: by their config where they have no
    result. One without a config stays."""
    begun = [
        {**settings.of(each.run), "status": each.state, "folder": each.folder}
        for each in states.values()
        if not each.run.result and "sparsity" in each.run.config
    ]
    known = pd.concat([collected, pd.DataFrame(begun, dtype=object)])
    fit, every = (
        set(map(os.path.realpath, some["folder"])) for some in (filtered(known, conditions), known)
    )
    return [run for path, run in states.items() if path not in every - fit]


def _sections(tables: Sequence[Table], baseline: str, folders: RunFolders) -> list[dict[str, Any]]:
    sections, refused = [], []
    for number, table in enumerate(tables, 1):
        try:
            table = against(table, baseline or "dense")
        except ConfigError as error:
            refused.append(error)
        history, pictures = History(table, folders), []
        for kind, about in plots.KINDS.items():
            if kind in ("ratio", "flops") and plots.alone(table):
                continue
            figure = plots.draw(kind, history, plots.logged(table), style.Layout(title=""))
            if figure is not None:
                name = f"part-{number}-{kind}"
                svg = style.embedded(figure, name)
                pictures.append(
                    {"id": name, "svg": svg, "about": f"{about.about}; {style.seeds(table)}"}
                )
        title, (values, *differences) = captions.title(table), grids(table)
        if values.caption[0] == title:  # the section's heading says it
            values = replace(values, caption=values.caption[1:])
        sections.append({"title": title, "tables": [values, *differences], "pictures": pictures})
    if baseline and len(refused) == len(tables):
        raise refused[0]
    return sections


def _runs(
    tables: Sequence[Table], keys: Sequence[str], target: Path, folders: RunFolders
) -> list[dict[str, Any]]:
    """Every run with its settings, metric, folder and command."""
    rows = []
    for table in tables:
        for run in table.records:
            folder, seconds = os.path.relpath(run["folder"], target.parent), run["seconds"]
            value = run.get(table.metric, math.nan)
            known: bool = not pd.isna(value) and math.isfinite(value)
            rows.append(
                {
                    "labels": [short(label(run[key])) for key in keys],
                    "value": notation.printed(value, table.metric) if known else "-",
                    "seconds": "-" if pd.isna(seconds) else f"{seconds:.1f}",
                    "link": quote(f"{folder}/") if os.path.isdir(run["folder"]) else "",
                    "name": label(run["id"]),
                    "command": status.typed(status.command(folders[run["folder"]])),
                }
            )
    return rows


def _environment(runs: pd.DataFrame, folders: RunFolders) -> list[tuple[str, str]]:
    """What the runs were made with, each value once."""
    values: dict[str, dict[str, None]] = {}
    for folder, commit in zip(runs["folder"], runs["commit"], strict=True):
        environment = folders[folder].result.get("environment", {"commit": label(commit)})
        for key, value in environment.items():
            values.setdefault(key, {})[str(value)] = None
    return [(key, ", ".join(every)) for key, every in values.items() if key != "command"]


def _listed(pairs: Iterable[tuple[str, str]]) -> Grid:
    return Grid([], 1, ["key", "value"], [([key], [Figure(value)]) for key, value in pairs])
