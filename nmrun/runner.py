"""One run, from a checked config to ``result.json``."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

import nmrun
from nmrun import checkpoint, environment, optim, plan, tasks
from nmrun.console import Console
from nmrun.errors import ConfigError, RunError
from nmrun.handle import Handle
from nmrun.identity import identity
from nmrun.loop import Interrupted, Loop, steps_per_epoch
from nmrun.schema import Config
from nmrun.track import Tracker, start_wandb


def run(config: Config, folder: Path, sweep: str | None = None) -> dict[str, Any]:
    """Train what ``config`` describes and leave the result in ``folder``; goes on from a checkpoint found there.

    Returns what ``result.json`` holds plus ``folder``, and ``signal`` after an interrupt; ``status`` is ``finished``, ``failed``,
    ``interrupted`` or (``dry=true``, nothing written) ``planned``. Raises ConfigError for a mistake that shows only now.
    """
    device = choose_device(config.trainer["device"])
    if config.dry:
        console = Console(None)
        loop, parameters = build(config, folder, device)
        console.say("\n".join(plan.lines(config, loop, parameters)))
        return {"status": "planned", "folder": str(folder)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir}: {error.strerror}: {error.filename}") from None
    with _locked(folder):
        if config.force or not config.resume:
            _clear(folder)
        return _run(config, folder, sweep, device)


def _run(config: Config, folder: Path, sweep: str | None, device: torch.device) -> dict[str, Any]:
    started = time.perf_counter()
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config.plain)))
    console = Console(folder / "run.log")
    result: dict[str, Any] = {
        "status": "failed",
        "id": identity(config),
        "config": config.plain,
        "metrics": {"final": {}, "best": {}},
        "sparsity": {},
        "events": [],
        "environment": environment.describe(device),
        "seconds": 0.0,
    }
    tracker: Tracker | None = None
    extra: dict[str, Any] = {}
    try:
        loop, parameters = build(config, folder, device)
        console.say("\n".join(plan.lines(config, loop, parameters)))
        earlier = _resume(loop, folder, console)
        wandb_run, where = start_wandb(config, result["id"], folder, sweep)
        if where and where not in ("online", "offline"):
            console.say(f"W&B: {where}")
        tracker = Tracker(folder, loop.step, wandb_run)
        result["metrics"] = loop.run(tracker, console)
        result["sparsity"], result["events"] = loop.handle.report(), loop.events
        result["status"] = "finished"
        seconds = earlier + time.perf_counter() - started
        console.say(closing(result, loop.handle, seconds))
    except Interrupted as stop:
        extra["signal"] = stop.number
        result["status"], result["error"] = "interrupted", f"{stop} at step {loop.step} of {loop.total_steps}"
        console.stop_progress()
        console.say(f"interrupted by {result['error']}; the same command goes on from there")
    except ConfigError:
        console.close()
        raise
    except RunError as error:
        result["error"] = str(error)
        console.stop_progress()
        console.say(f"failed: {error}")
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        console.stop_progress()
        console.say(f"failed: {result['error']} (traceback in {folder / 'run.log'})")
        console.note(traceback.format_exc())
    result["seconds"] = round(time.perf_counter() - started, 3)
    checkpoint.write_atomically(folder / "result.json", lambda path: path.write_text(json.dumps(result, indent=2) + "\n"))
    if tracker is not None:
        tracker.finish(result["metrics"], result["status"])
    console.say(f"  {folder}")
    console.close()
    return {**result, "folder": str(folder), **extra}


def build(config: Config, folder: Path, device: torch.device) -> tuple[Loop, int]:
    """Seed everything, then task, model, optimizer, recipe and loop. Returns the loop and the number of parameters."""
    trainer = config.trainer
    if trainer["threads"] is not None:
        torch.set_num_threads(trainer["threads"])
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    task = tasks.build(config, device)
    total_steps = trainer["epochs"] * steps_per_epoch(config, task)
    model = task.model(config.model).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = build_optimizer(config.optimizer, model)
    hyper = {key: value for key, value in config.recipe.items() if key not in ("name", "_target_")}
    try:
        handle = nmrun.sparsify(
            model,
            optimizer,
            config.recipe.get("_target_", config.recipe["name"]),
            config.pattern or "1:1",
            total_steps,
            config.model["include"],
            config.model["exclude"] or (),
            **hyper,
        )
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    return Loop(config, task, model, optimizer, handle, folder), parameters


def build_optimizer(optimizer: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam or AdamW whose second moment can be frozen, or SGD."""
    settings = {key: value for key, value in optimizer.items() if key != "name"}
    if optimizer["name"] == "sgd":
        return torch.optim.SGD(model.parameters(), **settings)
    settings["betas"] = tuple(settings["betas"])
    return {"adam": optim.Adam, "adamw": optim.AdamW}[optimizer["name"]](model.parameters(), **settings)


def choose_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch sees no CUDA device here; use auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def closing(result: dict[str, Any], handle: Handle, seconds: float) -> str:
    """The last lines of a finished run."""
    final, best = result["metrics"]["final"], result["metrics"]["best"]
    text = "finished: " + "  ".join(f"{name} {value:.4f}" for name, value in final.items()) + f"  in {seconds:.1f} s"
    if best:
        values = "  ".join(f"{name} {value:.4f}" for name, value in best.items() if name != "epoch")
        text += f"\n  best by validation, epoch {best['epoch']:g}: {values}"
    if handle.sparse:
        report = result["sparsity"]
        holds = sum(layer["holds"] for layer in report["layers"])
        text += f"\n  {report['pattern']} holds in {holds} of {len(report['layers'])} sparse layers, density {report['density']:.4f}"
    return text


def _resume(loop: Loop, folder: Path, console: Console) -> float:
    """Load the checkpoint, if any; returns the seconds that the run had taken by then."""
    try:
        if not loop.resume():
            return 0.0
    except Exception as error:  # damaged from outside: a checkpoint is replaced in one step
        raise ConfigError(
            f"{folder / 'checkpoint.pt'} cannot be loaded ({type(error).__name__}); force=true starts the run again from the beginning"
        ) from None
    console.say(f"resumed at step {loop.step} of {loop.total_steps}")
    try:
        return float(json.loads((folder / "result.json").read_text())["seconds"])
    except (OSError, ValueError, KeyError):
        return 0.0


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{folder} is in use by another process that does this very run") from None
        yield
