"""The end of a run: its weights, their metrics, ``result.json`` with the environment, and the last
lines on the screen."""

from __future__ import annotations

import math
import platform
import shlex
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nmrun import atomic
from nmrun.errors import RunError
from nmrun.kernels.compiler import cpuinfo
from nmrun.lab import ranks
from nmrun.lab.compare.notation import by_split
from nmrun.lab.config import sources
from nmrun.lab.keys.config import Config
from nmrun.lab.runs import documents
from nmrun.lab.runs.run_folder import (
    BEST,
    CHECKPOINT,
    DENSE,
    FINAL,
    PREVIOUS,
    RunFolder,
    metrics_of,
)
from nmrun.lab.tasks.base import Task
from nmrun.lab.train import checkpoint
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Loop
from nmrun.patterns import hold
from nmrun.registry import version_of


def write(
    outcome: dict[str, Any],
    config: Config,
    run_id: str,
    command: str,
    folder: Path,
    place: tuple[torch.device, str] | None,
) -> dict[str, Any]:
    """Complete the outcome of a run, and write ``result.json``, on the leader alone. That of a
    finished run has the hashes of the folder's files.

    ``place`` is the device and the precision that the run computed in; None where it ended before.
    Returns what is in the file; ``failed`` where it cannot be written.
    """
    described = environment(place[0] if place else torch.device("cpu"))
    packages = {path.partition(".")[0] for path in sources.targets(config.plain).values()}
    described |= {name: version for name in sorted(packages) if (version := version_of(name))}
    if place:
        described["precision"] = place[1]
    if command:
        described["command"] = command
    result: dict[str, Any] = documents.strict(
        {
            "status": outcome["status"],
            "id": run_id,
            "config": config.plain,
            "metrics": {"final": {}, "best": {}},
            "sparsity": {},
            "flops": {},
            "events": [],
            "environment": described,
            "steps": None,
            "seconds": 0.0,
            "training_seconds": 0.0,
            "checkpoint_seconds": 0.0,
            **outcome,
        }
    )
    try:
        if ranks.leads():
            return RunFolder(folder).write_result(result)
    except OSError as error:  # a full disk, say
        what = f"result.json cannot be written: {error.strerror}"
        return {**result, "status": "failed", "error": what}
    return result


def training(loop: Loop, status: str) -> dict[str, Any]:
    """What a training loop adds to its run's outcome, however it ended."""
    return {
        "metrics": {"final": {}, "best": loop.evaluation.best},
        "flops": loop.steps.flops_used,
        "events": loop.events,
        "steps": loop.steps.step if status == "finished" else loop.parts.total_steps,
        "seconds": round(loop.seconds, 3),
        "training_seconds": round(loop.training_seconds, 3),
        "checkpoint_seconds": round(loop.clock.spent, 3),
    }


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """What loggers show of a run that has ended, without nesting: metrics, those of the best
    weights under ``best/``, FLOPs under ``flops/``, and how it ended."""
    keys = ("status", "error", "metric", "higher_is_better", "seconds", "training_seconds")
    return {
        **metrics_of(result),
        **{f"flops/{key}": value for key, value in result.get("flops", {}).items()},
        **{key: result[key] for key in keys if key in result},
        "commit": result["environment"].get("commit"),
    }


def say(result: dict[str, Any], folder: Path, console: Console, loop: Loop | None) -> None:
    console.clear()
    if result["status"] == "failed":
        where = f"{folder} (run.log has the traceback)" if console.has_traceback else folder
        console.say(f"nmrun: failed: {result['error']}\n  {where}", error=True, style="bold red")
    elif result["status"] == "interrupted":
        progress, again = " before training", "begins it"
        if loop is not None:
            progress = f" at step {loop.steps.step} of {loop.parts.total_steps}"
            saved = (folder / CHECKPOINT).exists()
            again = "goes on from the last checkpoint" if saved else "starts over"
            if saved and not result["config"]["resume"]:
                again = "with resume=true goes on from the last checkpoint"
        message = f"  interrupted{progress}; the same command {again}"
        console.say(f"{message}\n  {folder}", style="yellow")
    else:
        final, best = result["metrics"]["final"], result["metrics"]["best"]
        metric, sparsity = result["metric"], result["sparsity"]
        layers = sparsity["layers"]
        count = sum(layer["holds"] for layer in layers)
        patterns = hold(layer["pattern"] for layer in layers)
        pattern = f"; {patterns} in {count} of {len(layers)} layers"
        scores = f"{by_split(final, metric)}{pattern if layers else ''}"
        console.say(f"  {metric}: {scores}; {result['seconds']:.1f} s", style="bold green")
        if best:
            word = "epoch" if isinstance(result["config"]["trainer"]["eval_every"], int) else "step"
            console.detail(f"  best {word} by validation, {best[word]}: {by_split(best, metric)}")
        console.say(f"  {folder}")


def finish(folder: Path, loop: Loop) -> dict[str, Any]:
    """Save the final weights and the best ones, and evaluate both on each split where that is still
    to do. Returns as :func:`finished`.

    The last step's validation is that of the final weights, unless these are an average, and the
    best weights may be the final ones. All ranks call. All that is done here can be done again from
    the last checkpoint, and counts as the run's time. RunError if the metric or a weight is not
    finite.
    """
    evaluation, report = loop.evaluation, loop.handle.report()
    began, metric = time.perf_counter(), f"eval/{loop.task.metric}"
    is_final = evaluation.last.get("step") == loop.steps.step and loop.average.last == 1
    last = evaluation.last.items() if is_final else ()
    validation = {key: value for key, value in last if key.startswith("eval/")}
    dense = evaluation.evaluate_dense("test")
    if not validation:
        dense |= evaluation.evaluate_dense("val")
    if not math.isfinite(validation.get(metric, 0.0)):
        raise RunError(f"the final {metric} is not finite")
    if evaluation.trainer.evaluate != "sparse" and loop.handle.sparse:
        save_weights(folder / DENSE, loop.strategy.gather(loop.strategy.dense_state_dict()))
    weights = loop.finalize()  # from here on, what is evaluated is what is saved
    save_weights(folder / FINAL, loop.strategy.gather(weights))
    best: dict[str, float] = dict(evaluation.best)
    if best:
        save_weights(folder / BEST, loop.strategy.gather(evaluation.best_weights))
    validated, tested = validation or evaluation.evaluate("val"), evaluation.evaluate("test")
    final = validated | tested | dense
    if not math.isfinite(final[metric]):
        raise RunError(f"the final {metric} is not finite")
    if best:
        if not validation or best["step"] != loop.steps.step:
            loop.model.load_state_dict(evaluation.best_weights)
            tested = evaluation.evaluate("test")
        best |= {"candidates": evaluation.candidates, **tested}
    loop.seconds += time.perf_counter() - began
    if ranks.leads():
        (folder / PREVIOUS).unlink(missing_ok=True)
        checkpoint.remove_unnamed(folder)
    return finished(loop.task, final, best, report)


def finished(
    task: Task, final: dict[str, float], best: dict[str, float], report: dict[str, Any]
) -> dict[str, Any]:
    """The part of ``result.json`` that only a finished run has."""
    return {
        "status": "finished",
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "metrics": {"final": final, "best": best},
        "notes": dict(task.notes),
        "signature": dict(task.signature),
        "sparsity": report,
    }


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    if ranks.leads():
        with atomic.replaced(path) as partial:
            save_file(weights, partial)


# --- the environment ------------------------------------------------------------------------------

PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "hydra-core", "wandb")


def environment(device: torch.device) -> dict[str, Any]:
    """Plain data; ``commit`` and ``dirty`` are null outside a checkout."""
    commit, dirty = _checkout()
    return {
        "commit": commit,
        "dirty": dirty,
        "nmrun": version_of("nmrun"),
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({_processor()})",
        "threads": torch.get_num_threads(),
        "ranks": ranks.world(),
        "command": shlex.join(["nmrun", *sys.argv[1:]]),
    }


@cache
def _checkout() -> tuple[str | None, bool | None]:
    """The commit of the code, and whether files under version control differ from it."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None, None
    words = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit, _, dirty = described.partition("-")
    return commit, bool(dirty)


def _processor() -> str:
    return cpuinfo().get("model name") or platform.processor() or platform.machine()
