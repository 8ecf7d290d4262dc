"""A comparison of tuned recipes: the trials of each cell, the runs of its seeds, and the tables.

Each cell has ``trials`` runs with the seed 1000. The best two by the validation split are
repeated with the seeds 1001 and 1002; the better mean wins, and has a run for each reported seed.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun import atomic
from nmrun.errors import ConfigError, RunError, refused
from nmrun.lab.api.runs import raise_interrupt, unchanged
from nmrun.lab.compare import notation
from nmrun.lab.compare.comparison import Comparison, Query, divide
from nmrun.lab.compare.notation import label
from nmrun.lab.compare.runs import row, to_csv
from nmrun.lab.config import command_line
from nmrun.lab.config.composition import Cache, config_of
from nmrun.lab.config.identity import identity, is_in_id, run_folder
from nmrun.lab.keys.config import Config, flatten
from nmrun.lab.output import span
from nmrun.lab.render import formats
from nmrun.lab.render.formats import aligned
from nmrun.lab.runs import documents, locks
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.sweeps import jobs
from nmrun.lab.tune import plan
from nmrun.lab.tune.plan import TuningCell
from nmrun.lab.tune.study import RUNS, SEED, Study, Trial, ended, of_result

DEFINITION = "study.json"
COMPOSED: Cache = {}  # shared by the runs of all cells


def check_names(folder: Path, cells: Sequence[TuningCell]) -> None:
    """Raise ConfigError where a cell was tuned under another name, as when fewer keys were swept: its
    seeds would count twice."""
    by_identity = {identity(cell.config): cell for cell in cells}
    for file in sorted(folder.glob(f"*/{DEFINITION}")):
        with refused(f"{file} is not whole: ", ValueError, KeyError, TypeError):
            cell = by_identity.get(documents.read_json(file)["identity"])
        if cell is not None and cell.folder != file.parent:
            raise ConfigError(
                f"{folder.name}: {cell.name} was tuned as {file.parent.name}, and its seeds would count "
                "twice; give the comparison another name"
            )


def check(cell: TuningCell) -> None:
    """Record what a cell searches. ConfigError where trials under this name had other settings or
    another space."""
    ours = {
        key: value
        for key, value in flatten(cell.config.plain).items()
        if is_in_id(key) and key != "seed" and key not in cell.searched
    }
    space = {key: str(search) for key, search in cell.searched.items()}
    cell.folder.mkdir(parents=True, exist_ok=True)
    file = cell.folder / DEFINITION
    if not file.exists():
        written = {"space": space, "settings": ours, "identity": identity(cell.config)}
        atomic.write(file, json.dumps(written, indent=1) + "\n", shared=True)
        return
    with refused(f"{file} is not whole: ", ValueError, KeyError, TypeError):
        before = documents.read_json(file)
        then, now = {**before["settings"], **before["space"]}, {**ours, **space}
        # a later version may have more keys, or other defaults: these change no id
        same = before["space"] == space and before.get("identity") == identity(cell.config)
    for key in () if same else sorted({*now, *before["space"]}):
        if then.get(key) != now.get(key):
            raise ConfigError(
                f"{cell.folder.parent.name}: {cell.name} was tuned with {key}={then.get(key)}, and now "
                f"{now.get(key)} is asked for; give the comparison another name"
            )


def run(cell: TuningCell, trials: int) -> bool:
    """Do a cell's trials and its seeds, as far as they are not done, with a line for each; False where another process is
    at work on it, or on the run of a seed, which comparisons share.

    KeyboardInterrupt or SystemExit come once the run's checkpoint is saved. ConfigError where the
    runs have no metric of a validation split. RunError where a run fails for a reason other than
    its settings, such as a full disk: it is no trial then."""
    with locks.hold(cell.folder) as ours:
        if not ours:
            return False
        while (number := len((study := study_of(cell)).trials())) < trials:
            params = study.propose(trials)
            study.add(params)
            trial = _try(cell, params, SEED)
            best = next(iter(study_of(cell).ranked(trials)), None)
            what = f"trial {number + 1}/{trials}  {params_text(params)}"
            _say(cell, what, trial, f", best {score_text(best)}")
        for params, seed in study.to_repeat(trials):
            trial = _try(cell, params, seed)
            _say(cell, f"seed {seed} of tuning  {params_text(params)}", trial)
        every = True
        for words, config in reported(cell, trials):
            if RunFolder(run_folder(config)).finished() is None:
                outcome = _train(cell, config, words)
                if outcome["status"] == "running":
                    every = False
                    continue
                _say(cell, f"seed {config.seed}", of_result(outcome, cell.searched))
    return every


def _say(cell: TuningCell, what: str, trial: Trial, beside: str = "") -> None:
    score = score_text(trial)
    print(f"{cell.name}  {what}  {score}{beside}  {trial.seconds:.0f} s", flush=True)


def reported(cell: TuningCell, trials: int) -> list[tuple[list[str], Config]]:
    """The runs of a cell's seeds, with the best settings of its first ``trials`` trials; none before
    these are known, and where all failed."""
    best = study_of(cell).best(trials)
    return [_run_of(cell, best.params, seed) for seed in cell.seeds] if best else []


def study_of(cell: TuningCell) -> Study:
    return Study(cell.folder, cell.searched, cell.defaults, ended(cell.folder, cell.searched))


def params_text(params: Mapping[str, Any]) -> str:
    """Write settings in short: ``lr=0.002 decay=1e-05``."""
    return " ".join(f"{key.rpartition('.')[2]}={label(value)}" for key, value in params.items())


def _run_of(
    cell: TuningCell, params: Mapping[str, Any], seed: int, *more: str
) -> tuple[list[str], Config]:
    words = [*cell.with_settings(params.items()), f"seed={seed}", *more]
    return words, config_of(words, cell.config_dir, COMPOSED)


def _try(cell: TuningCell, params: Mapping[str, Any], seed: int) -> Trial:
    """Do a run of the tuning, without the test split. Its checkpoint is removed: it would take most
    of the space, and nobody resumes the run."""
    place = command_line.word("output_dir", cell.folder / RUNS)
    words, config = _run_of(cell, params, seed, "trainer.test=false", place)
    outcome = _train(cell, config, words)
    from nmrun.lab.train import checkpoint  # after the run, since it imports torch

    checkpoint.remove(run_folder(config))
    trial = study_of(cell).run(params, seed)
    if trial is None:
        why = outcome.get("error") or (
            f"with {params_text(params)} it is the run of other settings too, as some of these keys "
            "change nothing beside others; search fewer of them, under another name"
        )
        raise RunError(f"{run_folder(config)}: {why}")
    return trial


def _train(cell: TuningCell, config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Do a run, whose own lines are in its ``run.log``; its outcome, ``finished``, ``failed`` or, in
    another process, ``running``."""
    with unchanged(), contextlib.redirect_stdout(io.StringIO()):
        outcome = jobs.one(config, command=command_line.typed(cell.config_dir, words))
    raise_interrupt(outcome)
    # without a config the run did not begin: files in its folder are wrong, or torch cannot be
    # loaded
    if outcome.get("of_machine") or (outcome["status"] == "failed" and "config" not in outcome):
        raise RunError(
            f"{run_folder(config)}: {outcome['error']}; no trial is lost, and the same command goes on"
        )
    return {**outcome, "status": "finished"} if outcome["status"] == "skipped" else outcome


def score_text(trial: Trial | None) -> str:
    """The value of a trial in words: ``validation accuracy 97.3 %``."""
    if trial is None or trial.value is None:
        return "failed"
    return notation.valued(trial.metric, trial.value)


# --- what was found -------------------------------------------------------------------------------

RUNS_CSV, TRIALS_CSV, TABLE = "runs.csv", "trials.csv", "table.md"
CELL = "tuned.cell"


@dataclass
class Outcome:
    """The results of a comparison so far.

    Attributes:
        cells: their names.
        runs: a row for each finished run of a seed, as of :func:`nmrun.lab.compare.runs.collect`,
            with ``tuned.*``: the cell, how it was tuned, and the seconds of that.
        trials: a row for each run of the tuning.
        tuning: for each cell its name, the number of trials, the winner's mean and settings once there
            is one, seconds.
        notes: a line for each best setting at an end of its range, and for each cell whose best
            settings fail, or nearly, with a seed.
        failed: the names of cells whose trials all failed, and the folders of failed runs.
    """

    cells: list[str]
    runs: list[dict[str, Any]] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    tuning: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def outcome_of(cells: Sequence[TuningCell], trials: int) -> Outcome:
    found = Outcome([cell.name for cell in cells])
    for cell in cells:
        _add(found, cell, trials)
    return found


def record_outcome(folder: Path, cells: Sequence[TuningCell], trials: int) -> Outcome:
    """Write the outcome so far. One process at a time: what it finds would drop the lines of a cell
    that another finished before it writes."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with locks.hold(folder) as ours:
            if ours:
                found = outcome_of(cells, trials)
                write_outcome(folder, found)
                return found


def _add(found: Outcome, cell: TuningCell, trials: int) -> None:
    study = study_of(cell)
    tried, best, seconds = study.trials()[:trials], study.best(trials), study.seconds(trials)
    for run in [*tried, *study.repeats()]:
        values = {"seed": run.seed, "value": run.value, "seconds": run.seconds}
        found.trials.append({"cell": cell.name, **values, **run.params})
    settings, has_ended = params_text(best.params) if best else "", study.has_ended(trials)
    if tried:
        count, score = str(len(tried)), score_text(best) if has_ended else "-"
        found.tuning.append([cell.name, count, score, settings, span(seconds)])
    if best is None:
        found.failed += [cell.name] if has_ended else []
        return
    tuned = {
        CELL: cell.name,
        "tuned.trials": len(tried),
        "tuned.over": plan.space_text(cell.searched),
        "tuned.by": best.metric,
        "tuned.seconds": seconds,
    }
    values_of_seeds: list[float | None] = []  # None where the run failed
    for _, config in reported(cell, trials):
        folder = run_folder(config)
        result = RunFolder(folder).result
        if result.get("status") == "finished":
            found.runs.append(row(result, folder) | tuned)
            values_of_seeds.append(result["metrics"]["final"].get(best.metric))
        elif result.get("status") == "failed":
            found.failed.append(str(folder))
            values_of_seeds.append(None)
    for key, value in best.params.items():
        if end := cell.edge(key, value):
            found.notes.append(
                f"{cell.name}: the best {key} is at the {end} end of {cell.searched[key]}; under "
                f"another name, look further with --over {key}=..."
            )
    of_tuning = study.values(best.params)
    lost = [_lost(best, of_tuning, values) for values in (of_tuning, values_of_seeds)]
    if any(lost):
        found.notes.append(
            f"{cell.name}: {lost[0]} of {len(of_tuning)} tuning seeds and {lost[1]} of "
            f"{len(values_of_seeds)} seeds failed with the best settings, or are worse than the tuning "
            f"seeds' median by more than a tenth ({score_text(best)}); under another name, search "
            "smaller learning rates"
        )


def _lost(best: Trial, of_tuning: Sequence[float | None], values: Sequence[float | None]) -> int:
    """Count the runs that ended with an error (None), or are worse than the tuning seeds' median by
    more than a tenth of it."""
    middle = statistics.median(value for value in of_tuning if value is not None)
    sign = 1 if best.higher_is_better else -1
    return sum(v is None or sign * (middle - v) > abs(middle) / 10 for v in values)


def write_outcome(folder: Path, found: Outcome) -> None:
    """Write ``runs.csv``, ``trials.csv`` and ``table.md``, each whole or not at all. Other cells'
    lines in the first two stay; without a line there is no such file."""
    for name, rows, key in ((RUNS_CSV, found.runs, CELL), (TRIALS_CSV, found.trials, "cell")):
        file, whole = folder / name, pd.DataFrame(rows, dtype=object)
        if file.exists():
            with (
                refused(f"{file} is damaged: ", ValueError, KeyError),
                contextlib.suppress(pd.errors.EmptyDataError),
            ):
                old = pd.read_csv(file, dtype=str, keep_default_na=False)
                others = old[~old[key].isin(found.cells)]
                columns = dict.fromkeys([*whole.columns, *others.columns])
                whole = pd.concat([others, whole]).reindex(columns=[*columns])
        if len(whole):
            atomic.write(file, to_csv(whole), shared=True)
        else:
            file.unlink(missing_ok=True)
    atomic.write(folder / TABLE, outcome_text(found), shared=True)


def outcome_text(found: Outcome) -> str:
    """The tables of the runs, with a row for each value of what else was swept, and what the trials
    found, as Markdown."""
    parts = []
    if found.runs:
        runs = pd.DataFrame(found.runs, dtype=object)
        parts.append(formats.render(Comparison(divide(runs, Query())), "markdown"))
    head = ["cell", "trials", "mean of three seeds", "settings", "time of tuning"]
    if found.tuning:
        parts.append(f"What the trials found\n\n{aligned(head, found.tuning)}\n")
    if found.notes:
        parts.append("\n".join([*found.notes, ""]))
    if found.failed:
        parts.append(f"failed: {', '.join(found.failed)}\n")
    return "\n".join(parts)
