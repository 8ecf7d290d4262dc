"""``nmrun.run`` and ``nmrun.sweep``: what a command line without a verb does, in this process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from nmrun.errors import ConfigError, RunError
from nmrun.lab.api import words
from nmrun.lab.api.process import unchanged
from nmrun.lab.api.result import Result
from nmrun.lab.compare.runs import collect, summary
from nmrun.lab.train import jobs
from nmrun.lab.words import command_line, schema
from nmrun.lab.words import sweep as record
from nmrun.lab.words.composition import jobs_of
from nmrun.lab.words.identity import run_folder
from nmrun.lab.words.sweep import recorded

if TYPE_CHECKING:
    import pandas as pd


def run(overrides: str | Sequence[str] | None = None, **settings: Any) -> Result:
    """Do one run, as ``nmrun [overrides]`` does. ::

        nmrun.run("recipe=step sparsity=2:8", seed=3, trainer={"epochs": 2})

    A run that has finished is skipped, one that was interrupted goes on from its checkpoint. What
    the command prints is printed. The process stays as it was: working folder, logging, Hydra,
    random numbers, torch's threads and determinism. While it trains, SIGINT and SIGTERM are
    handled.

    Args:
        overrides: words of the command line, ``--config-dir DIR`` included; a text is split as a
            shell splits it.
        settings: more overrides, which win: ``seed=3`` or ``trainer={"epochs": 2}``. A text is
            what one would type after ``key=``.

    Returns:
        The finished run.

    Raises:
        ConfigError: with all that is wrong with the settings, one line each.
        RunError: where the run failed; its folder has the traceback in ``run.log``.
        KeyboardInterrupt: after SIGINT, once the checkpoint is saved.
        SystemExit: likewise after another signal.
    """
    typed, config_dir = words.asked(overrides, settings, multirun=False)
    sweeps, (look,) = jobs.checked(typed, multirun=False, config_dir=config_dir)
    ((one, job),) = jobs_of(sweeps, config_dir, look.composed)
    if job.get("seeds") is not None:
        raise ConfigError(f"seeds={list(job.seeds)}: one run has one seed; see nmrun.sweep")
    config = schema.check(job)
    with unchanged():
        outcome = jobs.one(config, command=command_line.typed(config_dir, one))
    raise_interrupt(outcome)
    if outcome["status"] not in ("finished", "skipped", "planned"):
        raise RunError(" ".join(f"{outcome['error']}: {outcome['folder']}".split()))
    ends = outcome.get("metrics", {"final": {}, "best": {}})
    metrics = ends["final"] | {f"best/{key}": value for key, value in ends["best"].items()}
    folder = Path(outcome["folder"]).absolute()
    return Result(outcome["status"], config.plain, metrics, folder)


def sweep(overrides: str | Sequence[str]) -> pd.DataFrame:
    """Do the runs of a sweep one after the other, as ``nmrun -m overrides`` does without a
    launcher. ::

        nmrun.sweep("recipe=step,sr_ste sparsity=2:4,1:8 seed=0,1,2")

    Finished runs are skipped, and a failed one does not stop the others. The sweep is recorded for
    ``nmrun status``. The process stays as it was, as with :func:`run`.

    Args:
        overrides: words of the command line, with lists of values, ``zip=`` and ``experiment=``.

    Returns:
        A row for each run that has a result, failed ones included, as of :func:`nmrun.runs`; with
        ``dry=true``, which prints what the runs would be, those that have one already.

    Raises:
        ConfigError: with all that is wrong, one line each, before anything is run.
        RunError: where no run has a result.
        KeyboardInterrupt: after SIGINT, once the checkpoint is saved.
        SystemExit: likewise after another signal.
    """
    typed, config_dir = words.asked(overrides, {}, multirun=True)
    for word in filter(command_line.is_hydras, typed):
        raise ConfigError(f"{word}: Hydra's launchers are for the command line, nmrun -m")
    sweeps, looks = jobs.checked(typed, multirun=True, config_dir=config_dir)
    command = command_line.typed(config_dir, ["-m", *typed])
    folders = []
    with unchanged(), recorded(looks, command, []) as folder:
        for number, (typed_for_job, job) in enumerate(
            jobs_of(sweeps, config_dir, looks[0].composed), 1
        ):
            folders += _folders(job)
            again = command_line.of_job(typed_for_job, config_dir)
            outcome = jobs.of_sweep(folder, number, job, typed_for_job, again)
            raise_interrupt(outcome)
        print("\n".join([*record.planned(folder), record.summary(folder)[0]]))
    runs = collect(folders)
    if runs.empty:
        if looks[0].dry:
            return runs
        raise RunError("no run of this sweep has a result")
    return summary(runs)


def _folders(job: DictConfig) -> list[Path]:
    """The run folders of a job, one for each of its seeds; none of a job that will be refused."""
    folders = []
    for seed in [job.seed] if job.get("seeds") is None else job.seeds:
        job.seed = seed
        with contextlib.suppress(ConfigError):
            folders.append(run_folder(schema.check(job)))
    return folders


def raise_interrupt(outcome: dict[str, Any]) -> None:
    """Raise KeyboardInterrupt or SystemExit where a signal ended a run."""
    if outcome["status"] == "interrupted":
        if outcome["signal"] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + int(outcome["signal"]))
