"""One run, from a checked config to a run folder with its result."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from nmrun import locks, ranks
from nmrun.config.identity import finished, identity
from nmrun.errors import ConfigError, RunError
from nmrun.settings.config import Config
from nmrun.train import checkpoint, environment, plan
from nmrun.train.build import Parts, build
from nmrun.train.console import Console
from nmrun.train.decay_search import Found, find_decay
from nmrun.train.loop import Loop
from nmrun.train.track import Tracker

FILES = (
    *(
        checkpoint.CHECKPOINT,
        checkpoint.PREVIOUS,
        "result.json",
        "metrics.jsonl",
        "run.log",
        "config.yaml",
    ),
    *("model.safetensors", "best.safetensors"),
)


def run(
    config: Config, folder: Path, sweep: str | None = None, command: str = ""
) -> dict[str, Any]:
    """Train what ``config`` asks for in ``folder``; returns what is in ``result.json``, and the
    ``folder``.

    ``status`` is ``finished``, ``failed`` (with ``error``), ``interrupted`` (with ``signal``), or,
    without a file, ``planned`` for a dry run and ``skipped`` where another process has just
    finished the same run. ``sweep`` names the sweep it belongs to: its W&B group, and fewer lines
    on the screen. ``command`` is what asks for this run alone, for ``result.json`` and the top of
    ``config.yaml``. Raises ConfigError for a mistake that only the built model or the file system
    shows.
    """
    if config.dry:
        parts, _ = _build(config, search=False)
        print(
            "\n".join(
                [
                    plan.title(config),
                    *plan.lines(config, parts),
                    *(f"  {event}" for event in parts.handle.pop_events()),
                ]
            ),
            flush=True,
        )
        return {"status": "planned", "id": identity(config), "folder": str(folder)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written to")
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir}: {error}") from None
    ranks.begin(config.trainer.device)
    with locks.hold(folder) if ranks.leads() else contextlib.nullcontext(True) as ours:
        outcome = None
        if not ours:
            print(
                f"nmrun: another process is at work on this very run: {folder}",
                file=sys.stderr,
                flush=True,
            )
            outcome = {"status": "failed", "error": "another process is at work on this very run"}
        elif not config.force and (done := finished(folder)):
            outcome = {**done, "status": "skipped"}
        outcome = ranks.from_leader(outcome) or _Run(config, folder, sweep, command).result()
        return {**outcome, "folder": str(folder)}


def _build(
    config: Config, search: bool, times: dict[str, Any] | None = None
) -> tuple[Parts, Found | None]:
    """The parts of a run, and what was found beforehand: ``recipe.decay=auto`` is a search, whose
    result a checkpoint has.
    """
    if config.recipe.options.get("decay") != "auto":
        return build(config, times), None
    found = find_decay(config) if search else None
    decay = found.decay if found else 0.0
    plain = {**config.plain, "recipe": {**config.plain["recipe"], "decay": decay}}
    return build(Config(plain, config.pattern), times), found


class _Run:
    """A run whose folder is ours."""

    def __init__(self, config: Config, folder: Path, sweep: str | None, command: str) -> None:
        self.config, self.folder, self.sweep, self.command = config, folder, sweep, command
        self.console = Console(
            folder / "run.log" if ranks.leads() else None, brief=sweep is not None
        )
        self.signals = Signals()
        self.alone = False  # a failure that the other ranks do not know of, and wait
        self.loop: Loop | None = None
        self.tracker: Tracker | None = None

    def result(self) -> dict[str, Any]:
        """Train, and write ``result.json`` whatever happens (but for a configuration error, which
        leaves nothing).
        """
        outcome: dict[str, Any]
        try:
            outcome = self._train()
        except ConfigError:
            with contextlib.suppress(OSError):
                os.removedirs(self.folder)  # the empty folders only
            raise
        except KeyboardInterrupt:
            outcome = {"status": "interrupted", "signal": int(signal.SIGINT)}
        except Exception as error:
            self.console.note(traceback.format_exc())
            lines = str(error).strip().splitlines() or [""]
            outcome = {
                "status": "failed",
                "error": lines[0]
                if isinstance(error, RunError)
                else f"{type(error).__name__}: {lines[0]}",
            }
            self.alone = not isinstance(error, RunError)
        result = _strict(
            {
                "status": outcome["status"],
                "id": identity(self.config),
                "config": self.config.plain,
                "metrics": {"final": {}, "best": self.loop.best if self.loop else {}},
                "sparsity": {},
                "flops": self.loop.flops_used if self.loop else {},
                "events": self.loop.events if self.loop else [],
                "environment": environment.describe(
                    self.loop.device if self.loop else torch.device("cpu")
                )
                | ({"command": self.command} if self.command else {}),
                "seconds": round(self.loop.seconds, 3) if self.loop else 0.0,
                **outcome,
            }
        )
        try:
            if ranks.leads():
                checkpoint.write(self.folder / "result.json", json.dumps(result, indent=2) + "\n")
        except OSError as error:  # a full disk, say
            result |= {
                "status": "failed",
                "error": f"result.json cannot be written: {error.strerror}",
            }
        if self.tracker is not None:
            summary = {key: value for key, value in result.items() if key not in ("id", "config")}
            self.tracker.finish(summary, 0 if result["status"] == "finished" else 1)
        self._say_result(result)
        if self.alone and ranks.world() > 1:
            raise SystemExit(1)  # torchrun ends them
        # too late for this run, but a sweep has to stop
        if result["status"] == "finished" and self.signals.caught is not None:
            return {**result, "status": "interrupted", "signal": self.signals.caught}
        return result

    def _train(self) -> dict[str, Any]:
        """Train to the end, with smaller and smaller micro-batches where memory runs out and
        ``trainer.on_oom=halve``.
        """
        outcome, accumulate, fresh = (
            None,
            self.config.trainer.accumulate,
            self.config.force or not self.config.resume,
        )
        while outcome is None:
            try:
                outcome = self._sitting(accumulate, fresh)
            except Exception as error:
                if self.loop is None or not _out_of_memory(error):
                    raise
                accumulate, fresh = 2 * self.loop.accumulate, False
                told = f"step {self.loop.step + 1}: out of memory ({str(error).strip().splitlines()[0]})"
                # else the other ranks wait for a gradient that never comes
                alone = ranks.world() == 1
                if (
                    self.config.trainer.on_oom != "halve"
                    or accumulate > self.config.trainer.batch_size
                    or not alone
                ):
                    raise RunError(
                        f"{told}. Try trainer.accumulate={accumulate} or trainer.on_oom=halve"
                    ) from error
            # out of the handler, so that nothing holds on to the tensors of the failed step
            if outcome is None:
                self._free()
                self.console.say(f"  {told}; on with trainer.accumulate={accumulate}")
        return outcome

    def _free(self) -> None:
        self.loop = None
        if self.tracker is not None:
            self.tracker.finish({}, 1)
            self.tracker = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _sitting(self, accumulate: int, fresh: bool) -> dict[str, Any]:
        config, folder = self.config, self.folder
        state, complaints = (None, []) if fresh else checkpoint.load_last(folder)
        parts, found = _build(config, search=state is None, times=(state or {}).get("acceleration"))
        if ranks.leads():
            if state is None:
                for name in FILES:
                    (folder / name).unlink(missing_ok=True)
                checkpoint.remove_unnamed(folder)
                shutil.rmtree(folder / "wandb", ignore_errors=True)
            (folder / "result.json").unlink(missing_ok=True)
            said = f"# {self.command}\n" if self.command else ""
            checkpoint.write(
                folder / "config.yaml", said + OmegaConf.to_yaml(OmegaConf.create(config.plain))
            )
        self.console.say(plan.title(config))
        if complaints:
            self.console.say(f"  {'; '.join(complaints)}")
        for line in plan.lines(config, parts):
            self.console.detail(line)
        loop = self.loop = Loop(config, parts, self.console)
        if state is None:
            if found:
                loop.count_beforehand(found.seconds, found.flops)
                loop.events.insert(0, found.said)
            for event in loop.events:
                self.console.say(f"  {event}")
        else:
            if any(".parametrizations." in f".{name}" for name in state["model"]):
                raise RunError(
                    "checkpoint.pt is of an older nmrun, which kept the dense weights in the model; force=true starts over"
                )
            try:
                loop.load_state_dict(checkpoint.complete(folder, state, loop.model))
                state = None  # or else it would be kept beside what the loop has
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                raise RunError(
                    f"checkpoint.pt does not fit this version of the code; force=true starts over ({error})"
                ) from error
            self.console.say(f"  goes on at step {loop.step} of {loop.total_steps}")
        loop.accumulate = max(accumulate, loop.accumulate)
        if ranks.leads():
            self.tracker = Tracker(
                folder, config.plain, identity(config), self.sweep, loop.step, self.console.say
            )

        with self.signals:
            if not loop.train(folder, self.tracker, lambda: self.signals.caught is not None):
                # another rank's
                return {
                    "status": "interrupted",
                    "signal": self.signals.caught or int(signal.SIGTERM),
                }
            report = parts.handle.report()
            weights = loop.finalize()  # from here on, what is evaluated is what is saved
            final, best = loop.evaluate("val") | loop.evaluate("test"), dict(loop.best)
            _save_weights(folder / "model.safetensors", loop.held.gathered(weights))
            if best:
                _save_weights(folder / "best.safetensors", loop.held.gathered(loop.best_weights))
                loop.held.load_final_state_dict(loop.best_weights)
                best |= {"candidates": loop.candidates}
                best |= loop.evaluate("test")
        metrics = {"final": final, "best": best}
        if ranks.leads():
            (folder / checkpoint.PREVIOUS).unlink(missing_ok=True)
            checkpoint.remove_unnamed(folder)
        notes = dict(parts.task.notes)
        return {
            "status": "finished",
            "metric": parts.task.metric,
            "metrics": metrics,
            "notes": notes,
            "sparsity": report,
        }

    def _say_result(self, result: dict[str, Any]) -> None:
        say = self.console.say
        if result["status"] == "failed":
            say(
                f"nmrun: failed: {result['error']}\n  {self.folder} (run.log has the traceback)",
                error=True,
            )
        elif result["status"] == "interrupted":
            at = f" at step {self.loop.step} of {self.loop.total_steps}" if self.loop else ""
            say(
                f"  interrupted{at}; the same command goes on from the last checkpoint\n  {self.folder}"
            )
        else:
            final, best, layers = (
                result["metrics"]["final"],
                result["metrics"]["best"],
                result["sparsity"]["layers"],
            )
            held = sum(layer["holds"] for layer in layers)
            pattern = (
                f"; {result['sparsity']['pattern']} holds in {held} of {len(layers)} sparse layers"
                if layers
                else ""
            )
            metric = result["metric"]
            say(f"  {metric}: {_both(final, metric)}{pattern}; {result['seconds']:.1f} s")
            if best:
                self.console.detail(
                    f"  best epoch by validation, {best['epoch']}: {_both(best, metric)}"
                )
            say(f"  {self.folder}")


class Signals:
    """While entered, the first SIGINT or SIGTERM is noted in ``caught``, for training to stop; a
    second one acts at once.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # not in the main thread: whoever runs us there handles signals
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        self.__exit__()


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(
        error
    )


def _both(metrics: dict[str, float], metric: str) -> str:
    splits = {"test": "test", "validation": "eval"}
    found = {word: metrics.get(f"{split}/{metric}") for word, split in splits.items()}
    return ", ".join(f"{word} {value:.4f}" for word, value in found.items() if value is not None)


def _save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    if ranks.leads():
        with checkpoint.replaced(path) as partial:
            save_file(weights, partial)


def _strict(value: Any) -> Any:
    """Plain data that every JSON reader accepts: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
