"""Small runs for the tests: configs composed as the command line does, and their files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import save_file
from torch import Tensor, nn

from nmrun import recipes
from nmrun.errors import ConfigError
from nmrun.lab.config import composition, precheck, schema
from nmrun.lab.config.composition import Cache, composed, composing
from nmrun.lab.config.identity import run_folder
from nmrun.lab.models.images import SmallConvNetwork
from nmrun.lab.runs.locks import NAME
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.tasks.vision import Classification
from nmrun.lab.train import runner
from nmrun.lab.train.steps import TrainingSteps

RECIPES = tuple(recipes.RECIPES)
# of each kind one: a rule, a held mask, phases, a soft threshold, scores, adapters, other products
KINDS = tuple(
    "dense asp sr_ste step s_ste mdgf_linear lbc maskllm sqft slope bi_mask".split()  # noqa: SIM905
)
COMPOSED: Cache = {}  # shared by all tests of a process
# what 12 steps and 8 channels ask for
FITTING = {"sdgf_geometric": "recipe.frames=2", "t_sr_ste": "recipe.interval=5"}
TINY = (
    *("recipe=step", "sparsity='2:4'", "model.channels=[8,8,8]", "track=local"),
    *(
        "trainer.batch_size=32",
        "trainer.limit_batches=3",
        "trainer.epochs=4",
        "trainer.log_every=2",
    ),
    *("trainer.threads=1", "trainer.device=cpu"),
)


def config(output_dir: Path | str, *overrides: str) -> schema.Config:
    """The checked config of a run of 12 steps in 4 epochs, with these overrides."""
    network = any(word.startswith("model=") for word in overrides)
    tiny = [word for word in TINY if not (network and word.startswith("model.channels"))]
    fitting = [word for name, word in FITTING.items() if f"recipe={name}" in overrides]
    composition.register()
    with composing():
        words = [*tiny, f"output_dir={output_dir}", *fitting, *overrides]
        return schema.check(composed(words, COMPOSED))


def mistakes(
    words: Sequence[str],
    multirun: bool = False,
    config_dir: str | None = None,
    cache: Cache | None = None,
) -> list[str]:
    """What is wrong with a command line."""
    try:
        precheck.read([list(words)], multirun, config_dir, cache)
    except ConfigError as error:
        return error.problems
    return []


def result_of(folder: Path) -> dict[str, Any]:
    """result.json of a run."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def rewrite(folder: Path, **changes: Any) -> None:
    """Other values of some keys in result.json, of ``None`` none; that of a finished run is sealed anew."""
    result = result_of(folder) | changes
    left = {key: value for key, value in result.items() if value is not None}
    write_result(folder, left)


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """result.json as a run leaves it beside the files that are there."""
    RunFolder(folder).write_result(result)


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    clock = {"steps_per_second", "items_per_second", "time"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in clock} for line in lines]


@contextmanager
def at_work(*folders: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Other processes, each of which works in one of the folders."""
    code = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_CREAT), fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    others = []
    for folder in folders:
        words = [sys.executable, "-c", code, str(folder / NAME)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        others.append(other := subprocess.Popen(words, text=True, **pipes))
        other.stdout.readline()
    try:
        yield others
    finally:
        for other in others:
            other.communicate()


class Outcome(NamedTuple):
    """All of a finished run that must not depend on interruptions."""

    weights: list[bytes]
    rows: list[dict[str, Any]]
    metrics: dict[str, Any]
    events: list[dict[str, Any]]
    flops: dict[str, int]


def finished(cfg: schema.Config) -> dict[str, Any]:
    """The result of a run to the end, from wherever the run is."""
    result = runner.run(cfg, run_folder(cfg))
    assert result["status"] == "finished", result
    return result


def outcome(cfg: schema.Config) -> Outcome:
    folder, result = run_folder(cfg), finished(cfg)
    weights = [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "best")]
    return Outcome(weights, rows(folder), result["metrics"], result["events"], result["flops"])


class NoisyNetwork(SmallConvNetwork):
    """Running statistics and random numbers, which a run has to keep."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = nn.Sequential(nn.BatchNorm1d(self.head.in_features), nn.Dropout(0.2), self.head)


def build_noisy(options: dict[str, Any], inputs: dict[str, Any]) -> nn.Module:
    """Stands for ``models.build``."""
    return NoisyNetwork(**inputs, channels=options["channels"])


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def kill(cfg: schema.Config, owner: Any, name: str, call: int, before: bool = False) -> None:
    """Run until the given call of a function, and die right before or after it."""
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == call:
            raise Killed
        value = original(*args, **kwargs)
        if calls == call:
            raise Killed
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            runner.run(cfg, run_folder(cfg))
    assert not (run_folder(cfg) / "result.json").exists()


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """While entered, these signals have this handler."""
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


@contextmanager
def after_step(step: int | None, act: Callable[[TrainingSteps], object]) -> Iterator[None]:
    """While entered, ``act`` is called after this step of a run; None: after each."""
    original = TrainingSteps.train_step

    def stepped(loop: TrainingSteps, *args: Any, **kwargs: Any) -> None:
        original(loop, *args, **kwargs)
        if step in (None, loop.step):
            act(loop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSteps, "train_step", stepped)
        yield


@contextmanager
def signal_after(step: int, *numbers: int) -> Iterator[None]:
    """The process gets signals after so many steps of a run."""
    with after_step(step, lambda _: [os.kill(os.getpid(), number) for number in numbers]):
        yield


def evaluations(
    patch: pytest.MonkeyPatch, accuracies: Iterable[float], metric: str = "accuracy"
) -> None:
    """The evaluations of a run find these, one after the other."""
    left = iter(accuracies)
    patch.setattr(Classification, "evaluate", lambda *_: {"loss": 1.0, metric: next(left)})


def stopped(cfg: schema.Config, step: int) -> None:
    """A run that a signal ends after so many steps: all of them are saved."""
    with signal_after(step, signal.SIGTERM):
        assert runner.run(cfg, run_folder(cfg))["status"] == "interrupted"


def write_run(
    folder: Path,
    state: dict[str, Tensor],
    layers: list[dict[str, Any]],
    pattern: str = "2:4",
    status: str = "finished",
    **config: Any,
) -> Path:
    """The folder of a run, as far as exports read it: weights and a result."""
    folder.mkdir(parents=True)
    result = {
        "status": status,
        "id": "0123456789",
        "config": {"recipe": {"name": "ste"}, **config},
        "sparsity": {"pattern": pattern, "layers": layers},
    }
    weights = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    save_file(weights, folder / "model.safetensors")
    write_result(folder, result)
    return folder


def cut_off(cfg: schema.Config, step: int) -> None:
    """A run that Ctrl-C ends after so many steps, in the middle of it: the loop itself saves nothing."""
    original = TrainingSteps.train_step

    def dying(loop: TrainingSteps, *args: Any, **kwargs: Any) -> Any:
        if loop.step == step:
            raise KeyboardInterrupt
        return original(loop, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSteps, "train_step", dying)
        assert runner.run(cfg, run_folder(cfg))["status"] == "interrupted"


def resumed(
    place: Path,
    *words: str,
    by: Callable[[schema.Config, int], None] = stopped,
    steps: tuple[int, ...] = (7,),
) -> Outcome:
    """The outcome of a run that was ended ``by`` something at each of the steps; it is that of one
    left alone.
    """
    cut = config(place / "cut", *words)
    for step in steps:
        by(cut, step)
    ended = outcome(cut)
    assert ended == outcome(config(place / "alone", *words))
    return ended
