"""``nmrun prune [RUN] method=wanda sparsity=2:4 ...``: a trained network pruned in one shot, as a run
folder like that of a training.

Imports torch only after the command line is checked.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun import oneshot
from nmrun.errors import ConfigError, RunError
from nmrun.lab import arguments, consent, output
from nmrun.lab.config import sources
from nmrun.lab.config.identity import changed, identity, run_folder, title
from nmrun.lab.keys.config import Config
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import (
    FINAL,
    RunFolder,
    activations_of,
    make_folder,
    remove_empty,
)

if TYPE_CHECKING:
    from torch import nn

    from nmrun.lab.tasks.base import Batch, Task


def main(argv: Sequence[str]) -> int:
    parser = arguments.Parser(
        prog="nmrun prune",
        description="Prune a trained network in one shot, and evaluate it before and after.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a finished run's folder, or without one dataset=, model= (pretrained) and their keys; "
        "method=magnitude|wanda|ria|sparsegpt (default sparsegpt) and its method.KEY=VALUE; sparsity=N:M; "
        "samples=N calibration samples of the training split (default 128); seed= chooses them",
    )
    parser.add_argument("--config-dir", help="a folder of more configs")
    consent.consent_option(parser)
    options = parser.parse_intermixed_args(argv)
    from nmrun.lab.pruning.config import read_config

    config = read_config(options.words, options.config_dir, options.yes)
    folder = run_folder(config)
    print(title(config), flush=True)
    run_dir = RunFolder(folder)
    result = None if config.force else run_dir.finished()
    if run_dir.is_of_another and not config.force:
        raise RunError(f"{folder}: {run_dir.problem}; move it away, or force=true prunes again")
    if result is None:
        make_folder(folder, config.output_dir)
        output.waiting("loading torch and the data")
        try:
            with locks.hold(folder) as ours:
                if not ours:
                    raise RunError(f"{locks.holder(folder)} is at work on {folder}")
                result = run(config, folder, shlex.join(["nmrun", "prune", *argv]))
        except BaseException:
            remove_empty(folder, Path(config.output_dir).parent)
            raise
    else:
        names = ", ".join(changed(result["config"], config))
        how = f"; that was before {names} changed" if names else ""
        print(f"  finished already (force=true prunes again){how}")
        print("\n".join(f"  {line}" for line in oneshot.lines(result["sparsity"]["layers"])))
    final, metric = result["metrics"]["final"], result["metric"]
    for split, word in (("eval", "validation"), ("test", "test")):
        if f"{split}/{metric}" in final:
            before, after = final[f"{split}/dense/{metric}"], final[f"{split}/{metric}"]
            print(f"  {word} {metric}: {before:.4f} before, {after:.4f} after")
    print(f"  {folder}")
    return 0


def run(config: Config, folder: Path, command: str) -> dict[str, Any]:
    """Prune the network of a config, and write the run folder, which is there and ours; returns
    what is in ``result.json``.

    That is as of a training, with ``eval/dense/...`` and ``test/dense/...`` from before, and the
    output ``error`` of each layer.
    """
    from nmrun.lab import tasks
    from nmrun.lab.train import build, results, weights
    from nmrun.oneshot.prune import prune
    from nmrun.step.activations import SparseActivations

    began, run_id = time.perf_counter(), identity(config)
    device = build.prepare(config)
    precision = build.precision_of(config.trainer.precision, device)
    task = tasks.build(config, device)
    model = weights.network(config, task).to(device).eval()
    SparseActivations(model, activations_of(config.plain))
    hyperparameters = dict(config.recipe.options)
    batches = list(calibration(task, hyperparameters.pop("samples"), config.trainer.accumulate))
    with build.autocast(device, precision):
        before = _metrics(task, model, "dense/")
        pruned = prune(
            model, batches, config.recipe.name, config.pattern or "2:4",
            include=config.model.include, exclude=config.model.exclude,
            overrides=config.sparsity.overrides, pad=config.sparsity.pad,
            forward=task.loss, tell=lambda line: print(f"  {line}", flush=True), **hyperparameters,
        )  # fmt: skip
        after = _metrics(task, model, "")
    task.close()
    config = sources.recorded(config)
    RunFolder(folder).begin(config.plain, command, anew=True)
    state = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    results.save_weights(folder / FINAL, state)
    outcome = results.finished(task, after | before, {}, pruned.report())
    outcome["seconds"] = round(time.perf_counter() - began, 3)
    result = results.write(outcome, config, run_id, command, None, folder)
    if result["status"] != "finished":
        raise RunError(result["error"])
    return result


def calibration(task: Task, samples: int, accumulate: int) -> Iterator[Batch]:
    """The first samples that a training with this seed would see, in micro-batches; the last may be
    smaller. ConfigError where an epoch has fewer."""
    total = 0
    for index in range(task.batches_per_epoch):
        for batch in task.micro_batches(0, index, accumulate):
            remaining, count = samples - total, len(batch[0])
            yield batch if count <= remaining else tuple(part[:remaining] for part in batch)
            total += min(count, remaining)
            if total == samples:
                return
    raise ConfigError(f"samples={samples}: an epoch of the training split has {total}")


def _metrics(task: Task, model: nn.Module, prefix: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    splits = {"val": "eval"}
    if task.has_test:
        splits["test"] = "test"
    for split, name in splits.items():
        scores = task.evaluate(model, split)
        metrics |= {f"{name}/{prefix}{key}": value for key, value in scores.items()}
        if not math.isfinite(scores[task.metric]):
            what = "before it is pruned" if prefix else "once it is pruned"
            raise RunError(f"the network's {task.metric} is not finite {what}")
    return metrics
