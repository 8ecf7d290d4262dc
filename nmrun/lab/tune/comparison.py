"""A comparison of tuned recipes: the trials of each cell, the runs of its seeds, and the tables.

Each cell has ``trials`` runs with the seed 1000. The best two by the validation split are
repeated with the seeds 1001 and 1002; the better mean wins, and has a run for each reported seed.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from nmrun.lab.config.identity import identity, run_folder
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
from nmrun.ranges import Search

DEFINITION = "study.json"
COMPOSED: Cache = {}  # shared by the runs of all cells
Seeds = Sequence[float | None]  # the metric by seed; None where the run failed


def check(cell: TuningCell) -> None:
    """Record what a cell searches. ConfigError where trials under this name had other settings or
    another space."""
    flat = {
        key: value
        for key, value in flatten(cell.config.plain).items()
        if key not in cell.searched and key.partition(".")[0] not in ("track", "seed", "output_dir")
    }
    definition: dict[str, Any] = {
        "space": {key: str(search) for key, search in cell.searched.items()},
        "settings": json.loads(json.dumps(flat)),
        "identity": identity(cell.config),
    }
    cell.folder.mkdir(parents=True, exist_ok=True)
    file = cell.folder / DEFINITION
    if not file.exists():
        atomic.write(file, json.dumps(definition, indent=1) + "\n", shared=True)
        return
    with refused(f"{file} is not whole: ", ValueError, KeyError, TypeError):
        read = documents.read_json(file)
        then, now = ({**each["space"], **each["settings"]} for each in (read, definition))
        same = all(read[part] == definition[part] for part in ("identity", "space"))
    for key in () if same else sorted({*then, *now}):
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
            _say(cell, what, f"{score_text(trial)}, best {score_text(best)}", trial.seconds)
        for params, seed in study.to_repeat(trials):
            trial = _try(cell, params, seed)
            what = f"seed {seed} of tuning  {params_text(params)}"
            _say(cell, what, score_text(trial), trial.seconds)
        every = True
        for words in _reported(cell, trials):
            config = _composed(cell, words)
            if RunFolder(run_folder(config)).finished() is None:
                outcome = _train(cell, config, words)
                if outcome["status"] == "running":
                    every = False
                    continue
                trial = of_result(outcome, cell.searched)
                _say(cell, f"seed {config.seed}", score_text(trial), trial.seconds)
    return every


def _say(cell: TuningCell, what: str, score: str, seconds: float) -> None:
    print(f"{cell.name}  {what}  {score}  {seconds:.0f} s", flush=True)


def configs(cell: TuningCell, trials: int) -> list[Config]:
    """The runs of a cell's seeds, with the best settings of its first ``trials`` trials; none where
    all of these failed."""
    return [_composed(cell, words) for words in _reported(cell, trials)]


def _reported(cell: TuningCell, trials: int) -> list[list[str]]:
    best = study_of(cell).best(trials)
    return [_words(cell, best.params, seed) for seed in cell.seeds] if best else []


def study_of(cell: TuningCell) -> Study:
    return Study(cell.folder, cell.searched, cell.defaults, ended(cell.folder, cell.searched))


def params_text(params: Mapping[str, Any]) -> str:
    """Write settings in short: ``lr=0.002 decay=1e-05``."""
    return " ".join(f"{key.rpartition('.')[2]}={label(value)}" for key, value in params.items())


def _words(cell: TuningCell, params: Mapping[str, Any], seed: int) -> list[str]:
    return [*cell.with_settings(params.items()), f"seed={seed}"]


def _composed(cell: TuningCell, words: Sequence[str]) -> Config:
    return config_of(words, cell.config_dir, COMPOSED)


def _try(cell: TuningCell, params: Mapping[str, Any], seed: int) -> Trial:
    """Do a run of the tuning, without the test split. Its checkpoint is removed: it would take most
    of the space, and nobody resumes the run."""
    place = command_line.word("output_dir", cell.folder / RUNS)
    words = [*_words(cell, params, seed), "trainer.test=false", place]
    config = _composed(cell, words)
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
    return {
        **outcome,
        "status": "finished" if outcome["status"] == "skipped" else outcome["status"],
    }


def score_text(trial: Trial | None) -> str:
    """The value of a trial in words: ``validation accuracy 97.3 %``."""
    if trial is None or trial.value is None:
        return "failed"
    return notation.valued(trial.metric, trial.value)


# --- what was found -------------------------------------------------------------------------------

RUNS_CSV, TRIALS_CSV, TABLE = "runs.csv", "trials.csv", "table.md"
CELL = "tuned.cell"


@dataclass(frozen=True)
class Outcome:
    """The results of a comparison so far.

    Attributes:
        runs: as of :func:`nmrun.lab.compare.runs.collect`, with ``tuned.*``: the cell, how it was
            tuned, and the seconds of that.
        tuning: for each cell its name, the number of trials, the winner's mean and settings, seconds.
        edges: a line for each end of a range at which best settings lie.
        unsteady: a line for each cell whose best settings fail, or nearly, with a seed.
        failed: the names of cells whose trials all failed, and the folders of failed runs.
    """

    runs: pd.DataFrame
    trials: pd.DataFrame
    tuning: list[list[str]]
    edges: list[str]
    unsteady: list[str]
    failed: list[str]
    cells: Sequence[TuningCell]


def outcome_of(cells: Sequence[TuningCell], trials: int) -> Outcome:
    runs: list[dict[str, Any]] = []
    trial_rows: list[dict[str, Any]] = []
    tuning: list[list[str]] = []
    failed = []
    unsteady: list[str] = []
    edges: dict[tuple[str, Search, str], list[str]] = {}
    for cell in cells:
        study = study_of(cell)
        cell_trials, best, seconds = (
            study.trials()[:trials],
            study.best(trials),
            study.seconds(trials),
        )
        tuned = {
            CELL: cell.name,
            "tuned.trials": len(cell_trials),
            "tuned.over": "; ".join(f"{key} {search}" for key, search in cell.searched.items()),
            "tuned.by": best.metric if best else "",
            "tuned.seconds": seconds,
        }
        for run in [*cell_trials, *study.repeats()]:
            values = {key: getattr(run, key) for key in ("seed", "value", "seconds")}
            trial_rows.append({"cell": cell.name, **values, **run.params})
        if cell_trials:
            settings = params_text(best.params) if best else ""
            tuning.append(
                [cell.name, str(len(cell_trials)), score_text(best), settings, span(seconds)]
            )
        if best is not None:
            for key, value in best.params.items():
                if end := plan.at_edge(value, cell.searched[key]):
                    edges.setdefault((key, cell.searched[key], end), []).append(cell.name)
        if len(cell_trials) == trials and best is None:
            failed.append(cell.name)
        of_seeds: list[float | None] = []
        for config in configs(cell, trials):
            folder = run_folder(config)
            result = RunFolder(folder).result
            if result.get("status") == "finished":
                runs.append(row(result, folder) | tuned)
                of_seeds.append(result["metrics"]["final"].get(tuned["tuned.by"]))
            elif result.get("status") == "failed":
                failed.append(str(folder))
                of_seeds.append(None)
        if best is not None:
            unsteady += _unsteady(cell.name, best, study.values(best.params), of_seeds)
    run_frame, trial_frame = (
        pd.DataFrame(runs, dtype=object),
        pd.DataFrame(trial_rows, dtype=object),
    )
    return Outcome(run_frame, trial_frame, tuning, _edges(edges), unsteady, failed, cells)


def _unsteady(name: str, best: Trial, tuning: Seeds, seeds: Seeds) -> list[str]:
    """Count the runs in which the best settings fail, by the seeds of the tuning and by the final
    ones. Such a run ended with an error (None), or is worse than the tuning seeds' median by more
    than a tenth of it."""
    middle = statistics.median(value for value in tuning if value is not None)
    sign = 1 if best.higher_is_better else -1
    notes = []
    for values, which in ((tuning, "tuning seeds"), (seeds, "seeds")):
        lost = [v for v in values if v is None or sign * (middle - v) > abs(middle) / 10]
        if lost:
            notes.append(f"{len(lost)} of {len(values)} {which}")
    if not notes:
        return []
    return [
        f"{name}: {' and '.join(notes)} failed with the best settings, or are worse than the tuning seeds' "
        f"median by more than a tenth ({score_text(best)}); under another name, search smaller learning rates"
    ]


def _edges(edges: Mapping[tuple[str, Search, str], Sequence[str]]) -> list[str]:
    return [
        f"best at the {end} end of {key} {search}: {', '.join(names)}; under another name, look further "
        f"with --over {shlex.quote(f'{key}={plan.wider(search, end)}')}"
        for (key, search, end), names in edges.items()
    ]


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write ``runs.csv``, ``trials.csv`` and ``table.md``, each whole or not at all. Other cells'
    lines in the first two stay."""
    names = [cell.name for cell in outcome.cells]
    for name, ours, key in ((RUNS_CSV, outcome.runs, CELL), (TRIALS_CSV, outcome.trials, "cell")):
        whole = _with_other_cells(folder / name, ours, key, names)
        atomic.write(folder / name, to_csv(whole), shared=True)
    atomic.write(folder / TABLE, outcome_text(outcome), shared=True)


def _with_other_cells(
    file: Path, ours: pd.DataFrame, key: str, names: Sequence[str]
) -> pd.DataFrame:
    """The lines of other cells in a CSV file, then ours."""
    if not file.exists():
        return ours
    with refused(f"{file} is damaged: ", ValueError, KeyError):
        old = pd.read_csv(file, dtype=str, keep_default_na=False)
        others = old[~old[key].isin(names)]
    columns = dict.fromkeys([*ours.columns, *others.columns])
    return pd.concat([others, ours]).reindex(columns=[*columns])


def outcome_text(outcome: Outcome) -> str:
    """The tables of the runs, with a row for each value of what else was swept, and what the trials
    found, as Markdown."""
    parts = []
    if len(outcome.runs):
        parts.append(formats.render(Comparison(divide(outcome.runs, Query())), "markdown"))
    head = ["cell", "trials", "mean of three seeds", "settings", "time of tuning"]
    title = "What the trials found"
    if outcome.tuning:
        parts.append(f"{title}\n\n{aligned(head, outcome.tuning)}\n")
    notes = [*outcome.edges, *outcome.unsteady]
    if notes:
        parts.append("\n".join([*notes, ""]))
    if outcome.failed:
        parts.append(f"failed: {', '.join(outcome.failed)}\n")
    return "\n".join(parts)
