"""One run, from a checked config to a run folder with its result."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from nmrun import atomic
from nmrun.errors import ConfigError, RunError, first_line, tell
from nmrun.fast import measurement
from nmrun.lab import ranks
from nmrun.lab.config import sources
from nmrun.lab.config.identity import changed, identity, title
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import (
    CONFIG,
    LOG,
    METRICS,
    RESULT,
    RunFolder,
    make_folder,
    remove_empty,
    weights_in,
)
from nmrun.lab.signals import Signals, of_interrupt
from nmrun.lab.train import build, checkpoint, console, results, steps
from nmrun.lab.train.build import Parts
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Loop
from nmrun.lab.train.track import TrackedRun, Tracker
from nmrun.recipes.base import Event


def run(
    config: Config, folder: Path, sweep: str | None = None, command: str = ""
) -> dict[str, Any]:
    """Train what a checked config asks for; with ``dry`` build all and train nothing.

    ``sweep`` is the name of the sweep that the run belongs to: its W&B group, and fewer lines on
    the screen. ``command`` asks for this run alone.

    Returns what is in ``result.json``, and the ``folder``. ``status`` is ``finished``, ``failed``
    (with ``error``) or ``interrupted`` (with ``signal``). Without a file it is ``planned`` (a dry
    run), ``running`` (another process is at work on the same run) or ``skipped`` (one has finished
    it). ConfigError for a mistake that only the built model or the file system shows.
    """
    ranks.begin(config.trainer.device)
    threads = torch.get_num_threads()
    try:
        if config.dry:
            return {**_plan(config, sweep), "folder": str(folder)}
        make_folder(folder, config.output_dir)
        with locks.hold(folder) if ranks.leads() else contextlib.nullcontext(True) as ours:
            outcome = _from_leader(
                _without_training(config, folder, ours) if ranks.leads() else None
            )
            outcome = outcome or _Run(config, folder, sweep, command).result()
    except ConfigError:
        remove_empty(folder, Path(config.output_dir).parent)
        raise
    except OSError as error:  # a full disk, on which not even the failure can be written
        outcome = {"status": "failed", "error": f"{folder}: {error.strerror}", "of_machine": True}
        tell([outcome["error"]])
    finally:
        if config.trainer.threads is not None:  # they are this run's, and not a sweep's next one's
            torch.set_num_threads(threads)
    return {**outcome, "folder": str(folder)}


def _from_leader(outcome: dict[str, Any] | None) -> dict[str, Any] | None:
    """Send every rank the leader's outcome of a run that needs no training. A rank whose leader has
    ended ends."""
    try:
        return ranks.from_leader(outcome)
    except RuntimeError:  # of the connection
        if ranks.leads():
            raise
        raise SystemExit(1) from None  # the leader has said what is wrong, if anything is


def _plan(config: Config, sweep: str | None) -> dict[str, Any]:
    """The outcome of a dry run; ``failed`` where its parts, such as the user's own, cannot be
    built."""
    try:
        parts, _ = _planned(config, None, brief=sweep is not None)
    except ConfigError:
        raise
    except Exception as error:
        if of_interrupt(error):
            raise
        outcome = _failure(error)
        tell([f"failed: {outcome['error']} (without dry=true, run.log has the traceback)"])
        return outcome
    if sweep is not None:
        print(console.plan_line(parts), flush=True)
    else:
        for event in parts.handle.pop_events():
            print(f"  {event}", flush=True)
    return {"status": "planned", "id": identity(config)}


def _planned(config: Config, state: dict[str, Any] | None, brief: bool) -> tuple[Parts, list[str]]:
    """The parts of a run, and the lines of its plan, which are shown: nearly all before products
    are timed, which may take minutes. A checkpoint ``state`` says what a run that goes on keeps."""
    screen, known, events = Console(None, brief), state or {}, list[str]()
    total_steps = known.get("total_steps")
    if total_steps is None and (config.trainer.budget or "").startswith("seconds:"):
        total_steps, event = steps.steps_of_budget(config)
        events.append(event)
    parts = build.assembled(config, total_steps, known.get("precision"))
    plan = console.plan_lines(config, parts)
    for line in plan:
        screen.detail(line)
    parts = build.accelerated(config, replace(parts, events=events), known.get("acceleration"))
    products = [f"  {line}" for line in measurement.lines(parts.accelerated)]
    for line in products:
        screen.detail(line)
    return parts, plan + products


def _failure(error: Exception | SystemExit, loop: Loop | None = None) -> dict[str, Any]:
    """The outcome of a run that this error ended; where memory runs out, with what to try."""
    message = line = first_line(error)
    if not isinstance(error, RunError | ConfigError):
        message = f"{type(error).__name__}: {line}"
    of_machine = isinstance(error, (OSError, MemoryError, SafetensorError))
    # before training a MemoryError of Python's comes from the data, and a RunError from the network:
    # not from the batch size
    of_others = loop is None and isinstance(error, (MemoryError, RunError))
    if checkpoint.out_of_memory(error) and not of_others:
        where = "before training" if loop is None else f"step {loop.steps.step + 1}"
        message = f"{where}: out of memory ({line}). Try a larger trainer.accumulate"
        of_machine = False
    elif isinstance(error, OSError) and error.errno in atomic.FULL:
        message = f"{error.filename}: {error.strerror}"
    return {"status": "failed", "error": message, "of_machine": of_machine}


def _without_training(config: Config, folder: Path, ours: bool) -> dict[str, Any] | None:
    """The outcome of a run that another process has or had, or whose files are wrong; else None."""
    if not ours:
        error = f"{locks.holder(folder)} is at work on this very run"
        tell([f"{error}: {folder}"])
        return {"status": "running", "error": error}
    if config.force:
        return None
    run_dir = RunFolder(folder)
    if (result := run_dir.finished()) is not None:
        run_dir.say_finished(changed(result["config"], config))
        return {**result, "status": "skipped"}
    wrong = run_dir.broken()
    error = ""
    if run_dir.is_of_another:  # its checkpoint is not this run's either
        error = f"{RESULT}: {wrong[RESULT]}; move it away, or force=true makes all anew"
    elif METRICS in wrong:  # its rows are not in a checkpoint
        error = f"{METRICS} of this finished run: {wrong[METRICS]}; force=true makes all anew"
    if not error:
        return None
    tell([f"{error}: {folder}"])
    return {"status": "failed", "error": error}


class _Run:
    """A run whose folder is ours."""

    def __init__(self, config: Config, folder: Path, sweep: str | None, command: str) -> None:
        self.config, self.folder, self.sweep, self.command = config, folder, sweep, command
        # read once: the folder that init names may be moved while the run trains
        self.id = identity(config)
        log = folder / LOG if ranks.leads() else None
        self.console = Console(log, brief=sweep is not None)
        self.signals = Signals()
        self.alone = False  # the other ranks do not know of this failure, and would wait
        self.loop: Loop | None = None
        self.tracker: Tracker | None = None

    def result(self) -> dict[str, Any]:
        """Train, and write ``result.json`` whatever happens. Only a ConfigError before training leaves
        no file."""
        with self.signals:
            ended = self._written(self._outcome())
            if self.loop is not None:
                self.loop.task.close()
        if self.alone and ranks.world() > 1:
            raise SystemExit(1)  # torchrun ends them
        # too late for this run, but a sweep has to stop; the leader says when, as the others may have
        # the signal earlier or later
        caught = ranks.leads() and self.signals.caught is not None
        if ended["status"] == "finished" and caught:
            return {**ended, "status": "interrupted", "signal": self.signals.caught}
        return ended

    def _outcome(self) -> dict[str, Any]:
        """Train, and return the outcome whatever happened. From then on signals wait."""
        try:
            outcome = self._session()
            self.signals.then = "wait"
            return outcome
        except KeyboardInterrupt:
            self.signals.then = "wait"
            return self._interrupted(signal.SIGINT)
        except (Exception, SystemExit) as error:
            if isinstance(error, ConfigError) and self.loop is None:
                raise
            # a launcher's signal handler may exit the process; the user's code may not
            if isinstance(error, SystemExit) and self.signals.caught is not None:
                raise
            self.signals.then = "wait"
            self.console.note_traceback()
            self.alone |= not isinstance(error, RunError)
            # the signal that ended a process which this one needs may reach this one later
            time.sleep(0.1)
            if self.signals.caught is not None:
                return self._interrupted(signal.SIGTERM)
            return _failure(error, self.loop)

    def _interrupted(self, otherwise: signal.Signals) -> dict[str, Any]:
        return {"status": "interrupted", "signal": int(self.signals.caught or otherwise)}

    def _written(self, outcome: dict[str, Any]) -> dict[str, Any]:
        loop, place = self.loop, None
        if loop is None and RunFolder(self.folder).finished() is not None:
            # asked for anew by force=true, and ended before it began
            results.say(outcome, self.folder, self.console, loop)
            self.console.say("  the run that finished there before is as it was")
            return outcome
        if loop:
            outcome = results.training(loop, outcome["status"]) | outcome
            place = loop.parts.device, loop.parts.precision
        about = (self.config, self.id, self.command)
        ended = results.write(outcome, *about, self.folder, place)
        if self.tracker is not None:
            code = 0 if ended["status"] == "finished" else 1
            self.tracker.finish(results.summary(ended), code)
        results.say(ended, self.folder, self.console, loop)
        return ended

    def _session(self) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one."""
        config, folder, run_dir = self.config, self.folder, RunFolder(self.folder)
        # with force=true a run goes on that was begun with it here, and cut off
        cut_off = not run_dir.problem and run_dir.result.get("status") in (None, "interrupted")
        forced = config.force and not (cut_off and run_dir.begun.get("force") is True)
        fresh = forced or not config.resume
        state, complaints = (None, []) if fresh else checkpoint.load_last(folder)
        if state is None and not (fresh or complaints) and (folder / CONFIG).exists():
            complaints = ["begins anew: it ended before its first checkpoint"]
        if state is not None and state["id"] != self.id:
            raise RunError(
                f"checkpoint.pt is of run {state['id']}, this is run {self.id}: put this run's own "
                "checkpoint back, or start over with force=true"
            )
        prefix = "finished before, but " if run_dir.is_finished else ""
        complaints += [f"{prefix}{name}: {what}" for name, what in run_dir.broken().items()]
        rows = (state or {}).get("rows")
        # the log begins with the run's folder, once all is built
        parts, plan = _planned(config, state, self.console.brief)
        begun = {} if state is None else run_dir.begun
        complaints += _other_code(config, begun)
        self.config = config = sources.recorded(config, begun)
        if ranks.leads():
            if state is None:
                checkpoint.remove(folder)
                shutil.rmtree(folder / "wandb", ignore_errors=True)
            run_dir.begin(config.plain, self.command, anew=state is None)
        self.console.note(title(config))
        if complaints:
            self.console.say(f"  {'; '.join(complaints)}", style="yellow")
        for line in plan:
            self.console.note(line)
        loop = self.loop = Loop(config, parts, self.console, self.id)
        if state is None:
            for event in loop.events:
                self.console.say(f"  {event['sentence']}")
        else:
            _restore(loop, folder, state)
            state = None  # else it would be in memory twice
            self.console.say(f"  goes on at step {loop.steps.step} of {loop.parts.total_steps}")
        if ranks.leads():
            # a row that a signal put off is still to come, also where it was logged and then a kill came
            step = loop.steps.step - (loop.row is not None)
            about = TrackedRun(folder, config.plain, self.id, self.sweep)
            self.tracker = Tracker(about, step, self.console.say, rows)
            if text := self.tracker.problem:
                loop.events.append(Event(step, text, "log").record)
                self.console.say(f"  {text}")

        alone = ranks.world() == 1  # else the other ranks wait for this one's share
        with self.signals.set("wait"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "nmrun: ")  # the loop says these events itself
            while not loop.train(folder, self.tracker, self.signals):
                if not (alone and self.signals.passed_on()):
                    return self._interrupted(signal.SIGTERM)  # another rank's, if not ours
        with self.signals.set("act" if alone else "wait"):
            return results.finish(folder, loop)


def _other_code(config: Config, begun: dict[str, Any]) -> list[str]:
    """A warning if defaults or the user's own code have changed since the run has ``begun``, or that
    code since the run whose weights it reads. Call it once that code is imported."""
    lines = []
    if begun and (names := ", ".join(changed(begun, config))):
        lines.append(f"{names} changed since it began")
    for key, place in options.weights_named(config.plain).items():
        if names := ", ".join(sources.changed(weights_in(place)[0].config, config).values()):
            lines.append(f"{key} is a run of before {names} changed")
    return lines


def _restore(loop: Loop, folder: Path, state: dict[str, Any]) -> None:
    try:
        loop.load_state_dict(checkpoint.complete(folder, state, loop.model))
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        raise RunError(
            f"checkpoint.pt does not fit this version of the code; force=true starts over ({error})"
        ) from error
