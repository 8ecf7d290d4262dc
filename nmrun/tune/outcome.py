"""What a comparison found: the runs of its seeds, its trials, and the table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun.config.identity import finished, result_in, run_folder
from nmrun.files import whole
from nmrun.report import formats, rows
from nmrun.report.collect import row
from nmrun.report.markdown import table as aligned
from nmrun.report.numbers import printed
from nmrun.report.tables import build
from nmrun.tune.comparison import Cell, configs, shown, study_of
from nmrun.tune.study import SEED

RUNS, TRIALS, TABLE = "runs.csv", "trials.csv", "table.md"


@dataclass(frozen=True)
class Outcome:
    """What is there of a comparison.

    Attributes:
        runs: a row for each run of a seed, as of :func:`nmrun.report.collect.collect`, with
            ``tuned.*``: how the cell was tuned, and the seconds of that.
        trials: a row for each run of the tuning.
        found: for each cell its name, the number of trials, the winner's mean and settings, and the
            hours that the tuning took.
        failed: the names of cells without a good trial, and the folders of failed runs.
    """

    runs: pd.DataFrame
    trials: pd.DataFrame
    found: list[list[str]]
    failed: list[str]


def of(cells: Sequence[Cell], trials: int) -> Outcome:
    """Collect what a comparison's cells have.

    Args:
        cells: the cells.
        trials: the number of trials of each that count.
    """
    runs: list[dict[str, Any]] = []
    tried: list[dict[str, Any]] = []
    found: list[list[str]] = []
    failed = []
    for cell in cells:
        study = study_of(cell)
        done, best, seconds = study.trials()[:trials], study.best(trials), study.seconds(trials)
        tuned = {
            "tuned.trials": len(done),
            "tuned.over": "; ".join(f"{key} {search}" for key, search in cell.searched.items()),
            "tuned.by": best["metric"] if best else "",
            "tuned.seconds": seconds,
        }
        for trial in [*({"seed": SEED, **trial} for trial in done), *study.repeats()]:
            own = {key: trial[key] for key in ("seed", "value", "seconds")}
            tried.append({"cell": cell.name, **own, **trial["params"]})
        value = f"{best['metric']} {printed(best['value'], best['metric'])}" if best else "failed"
        settings = shown(best["params"]) if best else ""
        if done:
            found.append([cell.name, str(len(done)), value, settings, f"{seconds / 3600:.2f}"])
        failed += [cell.name] if len(done) == trials and best is None else []
        for config in configs(cell, trials):
            folder = run_folder(config)
            result = finished(folder)[0] or result_in(folder)
            if result.get("status") == "finished":
                runs.append(row(result, folder) | tuned)
            elif result.get("status") == "failed":
                failed.append(str(folder))
    of_seeds, of_trials = pd.DataFrame(runs, dtype=object), pd.DataFrame(tried, dtype=object)
    return Outcome(of_seeds, of_trials, found, failed)


def write(folder: Path, outcome: Outcome) -> None:
    """Write ``runs.csv``, ``trials.csv`` and ``table.md``, each whole or not at all."""
    for name, text_ in (
        (RUNS, rows.written(outcome.runs)),
        (TRIALS, rows.written(outcome.trials)),
        (TABLE, text(outcome)),
    ):
        whole.write(folder / name, text_, shared=True)


def text(outcome: Outcome) -> str:
    """The table of the runs, and what the trials found, as Markdown."""
    parts = []
    if len(outcome.runs):
        for _, part in outcome.runs.groupby(["dataset", "model", "optimizer"]):
            metric = f"test/{part['metric'].iloc[0]}"
            if metric not in part:
                metric = metric.replace("test/", "eval/")
            parts.append(
                formats.render([build(part, metric, ["recipe"], ["sparsity"])], "markdown")
            )
    head = ["cell", "trials", "mean of three seeds", "settings", "hours of tuning"]
    title = "What the trials found"
    parts += [f"{title}\n\n{aligned(head, outcome.found)}\n"] if outcome.found else []
    parts += [f"failed: {', '.join(outcome.failed)}\n"] if outcome.failed else []
    return "\n".join(parts)
