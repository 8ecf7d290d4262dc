"""What a comparison found: the runs of its seeds, its trials, and the table of both."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun import atomic
from nmrun.errors import RunError
from nmrun.lab.compare import records
from nmrun.lab.compare.comparison import Comparison
from nmrun.lab.compare.names import label
from nmrun.lab.compare.runs import row, to_csv, usual_metric
from nmrun.lab.compare.tables import build
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.show import formats
from nmrun.lab.show.markdown import table as aligned
from nmrun.lab.tune import space
from nmrun.lab.tune.comparison import configs, in_words, shown, study_of
from nmrun.lab.tune.plan import TuningCell
from nmrun.lab.words.identity import run_folder
from nmrun.lab.words.sweep import span
from nmrun.ranges import Search

RUNS, TRIALS, TABLE = "runs.csv", "trials.csv", "table.md"
CELL = "tuned.cell"
IN_TITLE = ("dataset", "model", "optimizer")


@dataclass(frozen=True)
class Outcome:
    """What is there of a comparison.

    Attributes:
        runs: a row for each run of a seed, as of :func:`nmrun.lab.compare.runs.collect`, with
            ``tuned.*``: the cell, how it was tuned, and the seconds of that.
        trials: a row for each run of the tuning.
        tuning: for each cell its name, the number of trials, the winner's mean and settings, and how
            long the tuning took.
        edges: a line for each end of a range at which best settings lie.
        failed: the names of cells without a good trial, and the folders of failed runs.
    """

    runs: pd.DataFrame
    trials: pd.DataFrame
    tuning: list[list[str]]
    edges: list[str]
    failed: list[str]
    cells: Sequence[TuningCell]


def of(cells: Sequence[TuningCell], trials: int) -> Outcome:
    """Collect what a comparison's cells have."""
    runs: list[dict[str, Any]] = []
    tried: list[dict[str, Any]] = []
    tuning: list[list[str]] = []
    failed = []
    edges: dict[tuple[str, Search, str], list[str]] = {}
    for cell in cells:
        study = study_of(cell)
        done, best, seconds = study.trials()[:trials], study.best(trials), study.seconds(trials)
        tuned = {
            CELL: cell.name,
            "tuned.trials": len(done),
            "tuned.over": "; ".join(f"{key} {search}" for key, search in cell.searched.items()),
            "tuned.by": best.metric if best else "",
            "tuned.seconds": seconds,
        }
        for run in [*done, *study.repeats()]:
            values = {key: getattr(run, key) for key in ("seed", "value", "seconds")}
            tried.append({"cell": cell.name, **values, **run.params})
        if done:
            settings = shown(best.params) if best else ""
            tuning.append([cell.name, str(len(done)), in_words(best), settings, span(seconds)])
        for key, value in best.params.items() if best else ():
            if end := space.at_edge(value, cell.searched[key]):
                edges.setdefault((key, cell.searched[key], end), []).append(cell.name)
        failed += [cell.name] if len(done) == trials and best is None else []
        for config in configs(cell, trials):
            folder = run_folder(config)
            result = RunFolder(folder).result
            if result.get("status") == "finished":
                runs.append(row(result, folder) | tuned)
            elif result.get("status") == "failed":
                failed.append(str(folder))
    of_seeds, of_trials = pd.DataFrame(runs, dtype=object), pd.DataFrame(tried, dtype=object)
    return Outcome(of_seeds, of_trials, tuning, _edges(edges), failed, cells)


def _edges(edges: Mapping[tuple[str, Search, str], Sequence[str]]) -> list[str]:
    return [
        f"best at the {end} end of {key} {search}: {', '.join(names)}; under another name, look further "
        f"with --over {shlex.quote(f'{key}={space.wider(search, end)}')}"
        for (key, search, end), names in edges.items()
    ]


def write(folder: Path, outcome: Outcome) -> None:
    """Write ``runs.csv``, ``trials.csv`` and ``table.md``, each whole or not at all. What the first
    two have of other cells stays there.
    """
    for name, new, key in (
        (RUNS, to_csv(outcome.runs), CELL),
        (TRIALS, to_csv(outcome.trials), "cell"),
    ):
        with_others = _others(folder / name, new, key, {cell.name for cell in outcome.cells})
        atomic.write(folder / name, with_others, shared=True)
    atomic.write(folder / TABLE, text(outcome), shared=True)


def _others(file: Path, new: str, key: str, mine: set[str]) -> str:
    """New lines after those that a CSV file has of other cells."""
    if not file.exists():
        return new
    try:
        with file.open(encoding="utf-8", newline="") as old:
            lines = [*csv.DictReader(old)]
    except (ValueError, csv.Error) as error:
        raise RunError(
            f"{file} is damaged: {error}; remove it and give the command again"
        ) from None
    others = [line for line in lines if line.get(key) and line[key] not in mine]
    if not others:
        return new
    lines = [*others, *csv.DictReader(io.StringIO(new))]
    columns = list(dict.fromkeys(column for line in reversed(lines) for column in line))
    cells = [[line.get(column) or "" for column in columns] for line in lines]
    return str(records.written([columns, *cells], "csv"))


def text(outcome: Outcome) -> str:
    """The tables of the runs, one for each value of what was swept besides recipe and ratio, and
    what the trials found, as Markdown.
    """
    parts = []
    apart = list(dict.fromkeys(key for cell in outcome.cells for key in cell.apart))
    rows = [key for key in apart if key.partition(".")[0] == "recipe"]
    if len(outcome.runs):
        # a frame of runs has `optimizer` for `optimizer.name`
        others = [key.removesuffix(".name") for key in apart if key not in rows]
        groups = list(dict.fromkeys([*IN_TITLE, *others]))
        labels = outcome.runs[groups].map(label).apply(tuple, axis=1)
        for values, part in outcome.runs.groupby(labels):
            table = build(part, usual_metric(part), ["recipe", *rows], ["sparsity"])
            pairs = zip(groups, values, strict=True)
            apart_by = [f"{key}={value}" for key, value in pairs if key not in IN_TITLE]
            heading = f"{', '.join(apart_by)}\n\n" if apart_by else ""
            parts.append(f"{heading}{formats.render(Comparison([table]), 'markdown')!s}")
    head = ["cell", "trials", "mean of three seeds", "settings", "time of tuning"]
    title = "What the trials found"
    parts += [f"{title}\n\n{aligned(head, outcome.tuning)}\n"] if outcome.tuning else []
    parts += ["\n".join([*outcome.edges, ""])] if outcome.edges else []
    parts += [f"failed: {', '.join(outcome.failed)}\n"] if outcome.failed else []
    return "\n".join(parts)
