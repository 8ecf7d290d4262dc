"""The runs and sweeps of a command line. All are checked first. Then they run one by one in this
process, or side by side by one of Hydra's launchers.

Imports no torch before a run begins.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from nmrun.errors import ConfigError, RunError, first_line, leads, refuse, tell
from nmrun.lab import output
from nmrun.lab.config import (
    command_line,
    composition,
    experiment,
    precheck,
    schema,
)
from nmrun.lab.config.composition import plain_errors, without_others_configs
from nmrun.lab.config.identity import changed, run_folder, title
from nmrun.lab.config.precheck import Command, Job
from nmrun.lab.keys.config import Config
from nmrun.lab.records import sweep
from nmrun.lab.records.sweep import recorded
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import RunFolder, make_folder
from nmrun.lab.sweeps import workers
from nmrun.lab.sweeps.workers import JobLines

composition.register()


def main(argv: list[str]) -> int:
    """Run what a command line without a verb asks for; returns the exit status. ConfigError with
    all that is wrong."""
    options = composition.options(argv)
    flags = [word for word in argv if word not in options.overrides]
    if options.hydra_help or options.shell_completion:
        _hydra(flags, options.overrides)
        return 0
    asked = checked(options.overrides, options.multirun, options.config_dir)
    if options.cfg or options.info:
        _hydra(flags, asked.sweeps[0])
        return 0
    if not options.multirun and asked.hydras:
        _hydra(flags, asked.sweeps[0])
        return _exit_status(_outcomes[-1])
    if not options.multirun:
        ((words, config),) = asked.jobs
        return _exit_status(
            _outcome_of(config, None, command_line.of_job(words, options.config_dir))
        )
    with recorded(asked, shlex.join(["nmrun", *argv]), asked.sweeps) as folder:
        os.environ[sweep.SWEEP], os.environ[workers.SWEEPER] = str(folder), str(os.getpid())
        if not asked.hydras or asked.dry:
            status = _run_one_by_one(folder, asked.jobs, options.config_dir)
        elif asked.launcher == "basic":
            status = _launch(flags, asked, asked.jobs)
        else:
            status = _launch_side_by_side(folder, asked, flags)
        if not leads():
            return status
        lines, bad = sweep.summary(folder)
        lines = "\n".join([lines, *sweep.lines(folder)])
    print(lines)
    return max(status, bad)


def checked(overrides: list[str], multirun: bool, config_dir: str | None = None) -> Command:
    """What a command line asks for, composed and checked. ConfigError with all that is wrong."""
    sweeps = [
        command_line.own_recipe(words, config_dir)
        for words in experiment.expand(overrides, multirun, config_dir)
    ]
    asked = precheck.read(sweeps, multirun, config_dir)
    if asked.detach and not (multirun and asked.queues):
        raise ConfigError("detach=true: add -m and launcher=slurm, whose jobs outlive the command")
    tell([] if multirun else command_line.without_effect(overrides))
    output.no_longer_waiting()  # a launcher's processes would write behind it
    return asked


def _run_one_by_one(folder: Path, jobs: Sequence[Job], config_dir: str | None) -> int:
    """Run the jobs of sweeps in this process; the exit status after an interrupt, or 0."""
    try:
        for outcome in run_jobs(folder, jobs, config_dir):
            if outcome["status"] == "interrupted":  # it ends the sweep, on every rank
                return _exit_status(outcome)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _launch(flags: list[str], asked: Command, jobs: Sequence[Job]) -> int:
    """Run these jobs by Hydra's launcher; likewise."""
    from nmrun.lab.sweeps import sweeper

    sweeper.register([words for words, _ in jobs])
    if asked.queues:
        from nmrun.lab.sweeps import slurm

        folders = {tuple(words): _place(config) for words, config in jobs}
        slurm.register(asked.detach, folders)
    try:
        _hydra(flags, asked.sweeps[0])
    except (SystemExit, KeyboardInterrupt) as stop:  # an interrupted job ends the sweep
        return int(stop.code or 0) if isinstance(stop, SystemExit) else 128 + signal.SIGINT
    return 0


def _launch_side_by_side(folder: Path, asked: Command, flags: list[str]) -> int:
    """Likewise, by a launcher that runs jobs side by side, with a line for each job that ends. Jobs
    for which nothing is to be done never come to it."""
    missing, done = _missing(asked)
    names = dict[str, None]()
    for number, ((words, config), outcome) in enumerate(done, len(missing) + 1):
        sweep.add(folder, outcome, words, 0.0, number)
        if outcome["status"] == "skipped":
            names |= dict.fromkeys(changed(outcome["config"], config))
    if names:
        tell([f"some finished before {', '.join(names)} changed; force=true runs all again"])
    if missing and not asked.detach:
        place = shlex.quote(asked.output_dir)
        watch = f"nmrun status {place} shows how far they are"
        print(f"jobs side by side: {watch}", flush=True)
    with (
        workers.Sweeper(folder, waits=asked.known.signals is not None) as sweeper,
        JobLines(folder, lambda: sweeper.catch(signal.SIGPIPE)),
    ):
        if not missing:
            return 0
        try:
            status = _launch(flags, asked, missing)
        except BrokenExecutor:
            status = 1
            if sweeper.caught is None:
                workers.note_killed(folder)
        except (ConfigError, RunError):
            raise
        except Exception as error:  # the launcher's own
            place = shlex.quote(asked.output_dir)
            raise RunError(
                f"launcher={asked.launcher}: {type(error).__name__}: {first_line(error)}; "
                f"nmrun status {place} shows whether jobs go on"
            ) from None
    return status if sweeper.caught is None else 128 + sweeper.caught


def _missing(asked: Command) -> tuple[list[Job], list[tuple[Job, dict[str, Any]]]]:
    """The jobs that are to be launched; and the others, with their outcomes: those whose run has
    finished, or that another process or the queue has."""
    missing, done = list[Job](), list[tuple[Job, dict[str, Any]]]()
    queued = sweep.in_queue(asked.output_dir) if asked.queues else {}
    for job in asked.jobs:
        folder = _place(job.config)
        outcome = _finished(job.config)
        if locks.is_locked(Path(folder)):
            error = f"{locks.holder(Path(folder))} is at work on this very run"
            outcome = {"status": "running", "folder": folder, "error": error}
        elif id := queued.get(folder):
            error = f"Slurm has it as job {id}"
            outcome = {"status": "queued", "folder": folder, "queue": id, "error": error}
        if outcome is None:
            missing.append(job)
        else:
            done.append((job, outcome))
    return missing, done


def _hydra(flags: list[str], overrides: list[str]) -> None:
    sys.argv[1:] = [*flags, *overrides]  # Hydra wants its options first
    os.environ["HYDRA_FULL_ERROR"] = "1"  # it raises its errors, and prints no traceback
    with plain_errors():
        _job()


# --- one job --------------------------------------------------------------------------------------

_outcomes: list[dict[str, Any]] = []


@hydra.main(config_path="pkg://nmrun.conf", config_name="nmrun", version_base="1.3")
def _job(composed: DictConfig) -> None:
    job = HydraConfig.get()
    workers.end_with_sweep()
    reads = precheck.launcher_of(job.launcher._target_).signals == "read"
    folder = Path(os.environ[sweep.SWEEP]) if job.mode == RunMode.MULTIRUN else None
    overrides = [command_line.unescaped(word) for word in job.overrides.task]
    with output.ends_quietly(), without_others_configs():  # jobs may run in other processes
        if folder:
            number = job.job.num + 1
            command = command_line.of_hydra(job, overrides)
            about = (folder, number, composed, overrides, command)
            if sweep.is_own(folder):
                outcome = _run_in_sweep(*about)
            else:
                outcome = _run_in_worker(*about, reads)
        else:
            outcome = _outcome_of(composed, None, command_line.of_hydra(job, overrides))
    _outcomes.append(outcome)
    workers.end_with_sweep()
    if folder and outcome["status"] == "interrupted" and not reads:
        raise SystemExit(_exit_status(outcome))


def _run_in_sweep(
    folder: Path, number: int, composed: DictConfig, overrides: list[str], command: str
) -> dict[str, Any]:
    """Run a job in the sweep's own process; as :func:`run_job`."""
    with workers.signals_for_run():
        if sweep.read(folder).signal is not None:  # between two jobs
            raise KeyboardInterrupt
        return run_job(folder, number, composed, overrides, command)


def _run_in_worker(
    folder: Path,
    number: int,
    composed: DictConfig,
    overrides: list[str],
    command: str,
    reads: bool,
) -> dict[str, Any]:
    """Run a job in a launcher's worker; as :func:`run_job`. Its output goes to a log. ``reads``: it
    reads of a signal in the record."""

    def begins(run: Path) -> None:
        sweep.begins(folder, number, overrides, run, workers.launched_this())
        if sweep.read(folder).signal is not None:
            raise KeyboardInterrupt

    interrupted = {"status": "interrupted", "signal": int(signal.SIGTERM)}
    began = time.monotonic()
    if sweep.read(folder).signal is not None:
        outcome = interrupted  # this job is never begun
    else:
        try:
            stop = workers.ends_by_record(folder) if reads else workers.ends_by_signal()
            with stop, output.logged(sweep.log_of(folder, number)):
                outcome = run_job(folder, number, composed, overrides, command, begins)
        except KeyboardInterrupt:
            outcome = interrupted
            sweep.add(folder, outcome, overrides, time.monotonic() - began, number)
    if outcome["status"] == "interrupted":
        workers.wait_for_others(folder)
    return outcome


def run_jobs(
    folder: Path,
    jobs: Sequence[Job],
    config_dir: str | None,
    begins: Callable[[Path], None] = lambda run: None,
) -> Iterator[dict[str, Any]]:
    """Run the jobs of sweeps in this process, and yield the outcome of each. A launcher of Hydra
    would compose each from the start, in 50 ms."""
    for number, (words, config) in enumerate(jobs, 1):
        command = command_line.of_job(words, config_dir)
        yield run_job(folder, number, config, words, command, begins)


def run_job(
    folder: Path,
    number: int,
    asked: Config | DictConfig,
    overrides: list[str],
    command: str,
    begins: Callable[[Path], None] = lambda run: None,
) -> dict[str, Any]:
    """Run job ``number``, from 1, of the sweep whose record is in ``folder``, and note its end there.

    ``command`` is the command line for this job alone. ``begins`` is called with its run folder.
    Returns the outcome as of :func:`nmrun.lab.train.runner.run`, with the status ``refused`` for a
    mistake.
    """
    began = time.monotonic()
    print(sweep.title(folder, number, overrides), flush=True)
    outcome = _outcome_of(asked, folder.name, command, begins)
    if leads():
        sweep.add(folder, outcome, overrides, time.monotonic() - began, number)
    return outcome


def _outcome_of(
    asked: Config | DictConfig,
    sweep: str | None,
    command: str,
    begins: Callable[[Path], None] = lambda run: None,
) -> dict[str, Any]:
    """Run a job; what a launcher of Hydra has composed, in another process maybe, is checked here."""
    try:
        config = asked if isinstance(asked, Config) else schema.check(asked)
        begins(run_folder(config))
        return one(config, sweep, command)
    except ConfigError as error:
        refuse(error.problems)
        return {"status": "refused", "folder": None, "error": "; ".join(error.problems)}


@functools.cache
def _runner() -> Any:
    """The module that trains, with torch. What is imported now stays until the process ends, so the
    garbage collector need not search it, which would take half a second in all. In a process that
    has torch already, the collector is left alone."""
    if "torch" in sys.modules:
        from nmrun.lab.train import runner

        return runner
    collects = gc.isenabled()
    gc.disable()
    try:
        from nmrun.lab.train import runner
    finally:
        gc.freeze()
        if collects:
            gc.enable()
    atexit.register(gc.freeze)
    return runner


def one(config: Config, sweep: str | None = None, command: str = "") -> dict[str, Any]:
    """Run what a config asks for, unless that has finished already; ``command`` asks for this run
    alone.

    Returns as :func:`nmrun.lab.train.runner.run`. ConfigError for a mistake that only the built model or
    the file system shows.
    """
    folder = run_folder(config)
    outcome = _finished(config)
    if outcome is not None:
        RunFolder(folder).say_finished(changed(outcome["config"], config))
        return outcome
    if not config.dry:
        make_folder(folder, config.output_dir)  # before torch is imported for nothing
    if sweep is None or not config.dry:
        with contextlib.suppress(OSError):  # a full disk behind the output must not end a run
            print(title(config), flush=True)
        output.waiting("loading torch and the data")
    try:
        run = _runner().run
    except (ImportError, OSError, MemoryError) as error:  # with too little memory, say
        first: BaseException = error  # numpy gives the reason below forty lines of advice
        while before := first.__cause__ or first.__context__:
            first = before
        line = f"torch, or what a run needs beside it, cannot be loaded: {first_line(first)}"
        refuse([line])
        return {"status": "failed", "folder": str(folder), "error": line}
    return run(config, folder, sweep, command)


def _finished(config: Config) -> dict[str, Any] | None:
    """The outcome of a run that has finished before, unless it is asked for anew."""
    folder = run_folder(config)
    result = None if config.force or config.dry else RunFolder(folder).finished()
    return None if result is None else {**result, "status": "skipped", "folder": str(folder)}


def _place(config: Config) -> str:
    return str(run_folder(config).absolute())


def _exit_status(outcome: dict[str, Any]) -> int:
    if outcome["status"] == "interrupted":
        return 128 + int(outcome["signal"])
    return {"finished": 0, "skipped": 0, "planned": 0, "refused": 2}.get(outcome["status"], 1)
