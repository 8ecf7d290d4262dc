"""What a comparison found: the runs of its seeds, its trials, and the table of both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun.config.identity import finished, result_in, run_folder
from nmrun.config.metric import higher_is_better
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
        trials: a row for each trial.
        failed: the names of cells without a good trial, and the folders of failed runs.
    """

    runs: pd.DataFrame
    trials: pd.DataFrame
    failed: list[str]


def of(cells: Sequence[Cell], trials: int) -> Outcome:
    """Collect what a comparison's cells have.

    Args:
        cells: the cells.
        trials: the number of trials of each that count.
    """
    runs: list[dict[str, Any]] = []
    tried: list[dict[str, Any]] = []
    failed = []
    for cell in cells:
        study = study_of(cell)
        done = study.trials()[:trials]
        best = study.best(trials)
        over = "; ".join(f"{key} {search}" for key, search in cell.searched.items())
        tuned = {
            "tuned.trials": len(done),
            "tuned.over": over,
            "tuned.by": best["metric"] if best else "",
            "tuned.seed": SEED,
            "tuned.seconds": sum(trial["seconds"] for trial in done),
        }
        for number, trial in enumerate(done, 1):
            tried.append(
                {
                    "cell": cell.name,
                    "trial": number,
                    **{k: trial[k] for k in ("metric", "value", "seconds")},
                    **trial["params"],
                }
            )
        failed += [cell.name] if len(done) == trials and best is None else []
        for config in configs(cell, trials):
            folder = run_folder(config)
            result = finished(folder)[0] or result_in(folder)
            if result.get("status") == "finished":
                runs.append(row(result, folder) | tuned)
            elif result.get("status") == "failed":
                failed.append(str(folder))
    return Outcome(pd.DataFrame(runs, dtype=object), pd.DataFrame(tried, dtype=object), failed)


def write(folder: Path, outcome: Outcome) -> None:
    """Write ``runs.csv``, ``trials.csv`` and ``table.md``, each whole or not at all."""
    for name, text_ in (
        (RUNS, rows.written(outcome.runs)),
        (TRIALS, rows.written(outcome.trials)),
        (TABLE, text(outcome)),
    ):
        beside = folder / f".{name}.{os.getpid()}"
        beside.write_text(text_, encoding="utf-8")
        beside.replace(folder / name)


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
    head = ["cell", "trials", "best", "settings", "hours of tuning"]
    lines: dict[str, list[dict[str, Any]]] = {}
    for trial in outcome.trials.to_dict("records"):
        lines.setdefault(trial["cell"], []).append({str(key): trial[key] for key in trial})
    found = [_found(name, trials) for name, trials in lines.items()]
    parts += ["What the trials found\n\n" + aligned(head, found) + "\n"] if found else []
    parts += [f"failed: {', '.join(outcome.failed)}\n"] if outcome.failed else []
    return "\n".join(parts)


def _found(name: str, trials: list[dict[str, Any]]) -> list[str]:
    hours = f"{sum(trial['seconds'] for trial in trials) / 3600:.2f}"
    good = [trial for trial in trials if trial["value"] is not None]
    if not good:
        return [name, str(len(trials)), "failed", "", hours]
    metric = good[0]["metric"]
    best = (max if higher_is_better(metric) else min)(good, key=lambda trial: trial["value"])
    params = {key: best[key] for key in best if "." in key and best[key] == best[key]}
    value = f"{metric} {printed(best['value'], metric)}"
    return [name, str(len(trials)), value, shown(params), hours]
