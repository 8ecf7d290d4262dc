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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from nmrun.errors import ConfigError, RunError, first_line, leads, refuse, tell
from nmrun.lab import output
from nmrun.lab.config import command_line, composition, launchers, precheck, schema
from nmrun.lab.config.composition import BasicSweeper, plain_errors, without_others_configs
from nmrun.lab.config.identity import changed, run_folder, title
from nmrun.lab.config.precheck import Command, Job
from nmrun.lab.keys.config import Config
from nmrun.lab.records import sweep
from nmrun.lab.records.sweep import recorded
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import RunFolder, make_folder
from nmrun.lab.sweeps import workers

composition.register()


def main(argv: list[str]) -> int:
    """Run what a command line without a verb asks for; returns the exit status. ConfigError with
    all that is wrong."""
    options = composition.options(argv)
    flags = [word for word in argv if word not in options.overrides]
    if options.shell_completion:
        _check_completion(options.overrides)
    if options.hydra_help or options.shell_completion:
        _hydra(flags, options.overrides)
        return 0
    asked = checked(options.overrides, options.multirun, options.config_dir)
    if options.cfg or options.info:
        _hydra(flags, asked.sweeps[0])
        return 0
    if not options.multirun:
        ((words, config),) = asked.jobs
        command = command_line.of_job(words, options.config_dir)
        return _exit_status(_outcome_of(config, None, command))
    with recorded(asked, shlex.join(["nmrun", *argv]), asked.sweeps) as folder:
        status = 0
        try:
            if asked.launcher == "basic" or asked.dry:
                for outcome in run_jobs(folder, asked.jobs, options.config_dir):
                    if outcome["status"] == "interrupted":  # it ends the sweep, on every rank
                        raise SystemExit(_exit_status(outcome))
            else:
                _launch(folder, asked, flags)
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except SystemExit as stop:
            if not isinstance(stop.code, int):  # the user's code, with its last words
                raise
            status = stop.code
        if not leads():
            return status
        lines, bad = sweep.summary(folder)
    print(lines)
    return max(status, bad)


def _check_completion(words: Sequence[str]) -> None:
    """Raise ConfigError for what Hydra's completion fails at."""
    what, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    known = what in ("install", "uninstall") or (what == "query" and "COMP_LINE" in os.environ)
    if not known or shell not in ("bash", "fish", "zsh"):
        raise ConfigError("-sc: it takes install=SHELL or uninstall=SHELL, with bash, fish or zsh")


def checked(overrides: list[str], multirun: bool, config_dir: str | None = None) -> Command:
    """What a command line asks for, composed and checked. ConfigError with all that is wrong."""
    sweeps = command_line.expand(overrides, multirun, config_dir)
    asked = precheck.read(sweeps, multirun, config_dir)
    if asked.detach and not (multirun and asked.known.queues):
        raise ConfigError("detach=true: add -m and launcher=slurm, whose jobs outlive the command")
    tell([] if multirun else command_line.without_effect(overrides))
    output.no_longer_waiting()  # a launcher's processes would write behind it
    return asked


def _launch(folder: Path, asked: Command, flags: list[str]) -> None:
    """Run the jobs side by side by a launcher of Hydra's, with a line for each that ends. Jobs for
    which nothing is to be done never come to it. SystemExit or KeyboardInterrupt after a signal."""
    queued = sweep.in_queue(asked.output_dir) if asked.known.queues else {}
    jobs = [(job, _done(job.config, queued)) for job in asked.jobs]
    missing = [job for job, outcome in jobs if outcome is None]
    done = [(job, outcome) for job, outcome in jobs if outcome is not None]
    names = dict[str, None]()
    for number, ((words, config), outcome) in enumerate(done, len(missing) + 1):
        sweep.add(folder, outcome, words, 0.0, number)
        if outcome["status"] == "skipped":
            names |= dict.fromkeys(changed(outcome["config"], config))
    if names:
        tell([f"some finished before {', '.join(names)} changed; force=true runs all again"])
    watch = f"nmrun status {shlex.quote(asked.output_dir)} shows"
    if missing and not asked.detach:
        print(f"jobs side by side: {watch} how far they are", flush=True)
    with workers.Sweeper(folder, waits=asked.known.signals is not None) as sweeper:
        try:
            if missing:
                os.environ[sweep.SWEEP] = str(folder)
                os.environ[workers.SWEEPER] = str(os.getpid())
                _by_hydra(missing, asked, flags)
        except BrokenExecutor:
            if sweeper.caught is None:
                workers.note_killed(folder)
        except (KeyboardInterrupt, SystemExit):
            if sweeper.caught is None:
                raise
        except (ConfigError, RunError):
            raise
        except Exception as error:  # the launcher's own
            raise RunError(
                f"launcher={asked.launcher}: {type(error).__name__}: {first_line(error)}; "
                f"{watch} whether jobs go on"
            ) from None
    if sweeper.caught is not None:
        raise SystemExit(128 + sweeper.caught)


def _done(config: Config, queued: Mapping[str, str]) -> dict[str, Any] | None:
    """The outcome of a job that is not to be launched: its run has finished, or another process or
    the queue has it."""
    folder = run_folder(config).absolute()
    if locks.is_locked(folder):
        error = f"{locks.holder(folder)} is at work on this very run"
        return {"status": "running", "folder": str(folder), "error": error}
    if id := queued.get(str(folder)):
        error = f"Slurm has it as job {id}"
        return {"status": "queued", "folder": str(folder), "queue": id, "error": error}
    return _finished(config)


def _by_hydra(jobs: Sequence[Job], asked: Command, flags: list[str]) -> None:
    NMSweeper.jobs = [list(words) for words, _ in jobs]
    Plugins.instance().register(NMSweeper)
    Plugins.instance().class_name_to_class[composition.SWEEPER["_target_"]] = NMSweeper
    if asked.known.queues:
        from nmrun.lab.sweeps import slurm

        folders = {tuple(words): str(run_folder(config).absolute()) for words, config in jobs}
        slurm.register(asked.detach, folders)
    _hydra(flags, asked.sweeps[0])


class NMSweeper(BasicSweeper):
    """Launches the jobs of several sweeps at once, so that a launcher can run any side by side.

    ``jobs`` has the words of each. It is the class's, since Hydra makes the sweeper.
    """

    jobs: ClassVar[list[list[str]]] = []

    def split_arguments(  # type: ignore[override]  # a static method there
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The words of all jobs, in batches."""
        return list(self.split_overrides_to_chunks(self.jobs, max_batch_size))

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: ``precheck`` checked the jobs, and composing them all takes long."""


def _hydra(flags: list[str], overrides: list[str]) -> None:
    sys.argv[1:] = [*flags, *overrides]  # Hydra wants its options first
    os.environ["HYDRA_FULL_ERROR"] = "1"  # it raises its errors, and prints no traceback
    with plain_errors():
        _job()


# --- one job --------------------------------------------------------------------------------------


@hydra.main(config_path="pkg://nmrun.conf", config_name="nmrun", version_base="1.3")
def _job(composed: DictConfig) -> None:
    """A job that a launcher runs: in a process of its own, or (joblib with ``n_jobs=1``) in the
    sweep's."""
    job, folder = HydraConfig.get(), Path(os.environ[sweep.SWEEP])
    workers.end_with_sweep()
    reads = launchers.launcher_of(job.launcher._target_).signals == "read"
    overrides = [command_line.unescaped(word) for word in job.overrides.task]
    about = folder, job.job.num + 1, composed, overrides, command_line.of_hydra(job, overrides)
    with output.ends_quietly(), without_others_configs():
        if sweep.is_own(folder):
            with workers.signals_for_run():
                _end_after_signal(folder)  # between two jobs
                outcome = run_job(*about)
        else:
            outcome = _run_in_worker(*about, reads)
    workers.end_with_sweep()
    if outcome["status"] == "interrupted" and not reads:
        raise SystemExit(_exit_status(outcome))


def _end_after_signal(folder: Path) -> None:
    if sweep.read(folder).signal is not None:
        raise KeyboardInterrupt


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
        _end_after_signal(folder)

    outcome = {"status": "interrupted", "signal": int(signal.SIGTERM)}
    began = time.monotonic()
    if sweep.read(folder).signal is None:  # else this job is never begun
        try:
            stop = workers.ends_by_record(folder) if reads else workers.ends_by_signal()
            with stop, output.logged(sweep.log_of(folder, number)):
                outcome = run_job(folder, number, composed, overrides, command, begins)
        except KeyboardInterrupt:
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
    is_first = "torch" not in sys.modules and gc.isenabled()
    if is_first:
        gc.disable()
    try:
        from nmrun.lab.train import runner
    finally:
        if is_first:
            gc.freeze()
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


def _exit_status(outcome: dict[str, Any]) -> int:
    if outcome["status"] == "interrupted":
        return 128 + int(outcome["signal"])
    return {"finished": 0, "skipped": 0, "planned": 0, "refused": 2}.get(outcome["status"], 1)
