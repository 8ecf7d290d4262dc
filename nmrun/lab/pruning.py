"""``nmrun prune [RUN] method=wanda sparsity=2:4 ...``: a trained network pruned in one shot, as a run
folder like that of a training. In its config a one-shot method is in the place of the recipe.

Imports torch only after the command line is checked.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from nmrun import oneshot
from nmrun.errors import ConfigError, RunError, raise_all, refused
from nmrun.lab import arguments, output
from nmrun.lab.config import command_line, precheck, schema, sources, suggestions
from nmrun.lab.config.identity import changed, identity, run_folder, title
from nmrun.lab.keys import options as options_of
from nmrun.lab.keys.config import Config, flatten
from nmrun.lab.keys.groups import Run
from nmrun.lab.keys.models import OwnModel, Timm
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import FINAL, RunFolder, activations_of, make_folder, remove_empty
from nmrun.patterns import Pattern, PatternError
from nmrun.ranges import check_values, whole

if TYPE_CHECKING:
    from torch import nn

    from nmrun.lab.tasks.base import Batch, Task

SAMPLES = 128  # as in the papers
DEFAULT = "sparsegpt"


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
        f"method={'|'.join(oneshot.METHODS)} (default {DEFAULT}) and its method.KEY=VALUE; sparsity=N:M; "
        f"samples=N calibration samples of the training split (default {SAMPLES}); seed= chooses them",
    )
    parser.add_argument("--config-dir", help="a folder of more configs")
    arguments.consent_option(parser)
    options = parser.parse_intermixed_args(argv)
    config = read_config(options.words, options.config_dir, options.yes)
    folder = run_folder(config)
    print(title(config), flush=True)
    run_dir = RunFolder(folder)
    result = None if config.force else run_dir.finished()
    if result is not None:
        run_dir.say_finished(changed(result["config"], config))
    elif run_dir.is_of_another and not config.force:
        raise RunError(f"{folder}: {run_dir.problem}; move it away, or force=true prunes again")
    else:
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
    final, metric = result["metrics"]["final"], result["metric"]
    for split, word in (("eval", "validation"), ("test", "test")):
        if f"{split}/{metric}" in final:
            before, after = final[f"{split}/dense/{metric}"], final[f"{split}/{metric}"]
            print(f"  {word} {metric}: {before:.4f} before, {after:.4f} after")
    print(f"  {folder}")
    return 0


# --- the config -----------------------------------------------------------------------------------


def read_config(
    words: Sequence[str], config_dir: str | None = None, trusted: bool = False
) -> Config:
    """The config of the command: its recipe is the method, with its hyperparameters and
    ``samples``.

    ``words`` are at most one run folder; ``method=NAME``, ``method.KEY=VALUE`` and ``samples=N``;
    and overrides. ``trusted``: whether the code that a run names may be imported.
    """
    folders = [word for word in words if "=" not in word]
    overrides, problems = command_line.parsed([word for word in words if "=" in word])
    problems += [f"{word}: one run folder; all else is key=value" for word in folders[1:]]
    settings, rest = dict[str, Any](), list[Override]()
    for override in overrides:
        key, line = override.key_or_group, override.input_line
        group = key.partition(".")[0]
        if override.is_sweep_override():
            problems.append(f"{line}: several values make a sweep, and this is one run")
        elif key == "samples" or group == "method":
            settings[key] = override.value()
        elif line == "track=local":  # as it is anyway
            continue
        elif group in ("recipe", "track", "dry"):
            problems.append(
                f"{line}: nmrun prune has method= in the place of a recipe, tracks nothing, and has no plan"
            )
        else:
            rest.append(override)
    raise_all(problems)
    samples, method = settings.pop("samples", SAMPLES), str(settings.pop("method", DEFAULT))
    check_values({"samples": whole(1)}, {"samples": samples})
    config = _of_run(Path(folders[0]), rest, trusted) if folders else _compose(rest, config_dir)
    if config.is_dense:
        raise ConfigError("sparsity=dense: nothing would be pruned")
    hyperparameters = {key.partition(".")[2]: value for key, value in settings.items()}
    pruner = oneshot.build(method, hyperparameters)
    recipe = {"name": pruner.name, "samples": samples, **dataclasses.asdict(pruner)}
    plain = {**config.plain, "recipe": recipe, "track": {"name": "local", "tags": [], "also": []}}
    return Config(plain, config.pattern)


def _compose(overrides: list[Override], config_dir: str | None) -> Config:
    words = [*(str(override.input_line) for override in overrides), f"recipe={schema.STAND_IN}"]
    config = precheck.read([words], config_dir=config_dir).jobs[0].config
    model = config.model
    loads = isinstance(model, OwnModel) or model.trained
    if isinstance(model, Timm):
        loads = bool((model.options or {}).get("pretrained"))
    if config.init is None and not loads:
        raise ConfigError(
            f"model={model.name} comes untrained: name a finished run, or a pretrained model "
            "(model=hf_causal model.pretrained=FOLDER)"
        )
    return config


def _of_run(folder: Path, overrides: list[Override], trusted: bool) -> Config:
    """The config of a finished run, with changes, which begins with the run's weights."""
    run = RunFolder(folder)
    run.demand(folder)
    before = run.result["config"]
    arguments.demand_consent(folder, before, trusted)
    # the folder may have been copied, so its output_dir need not exist here
    here = {"init": str(folder), "output_dir": Run.output_dir}
    plain: dict[str, Any] = {**before, **here, "recipe": {"name": schema.STAND_IN}}
    if plain["sparsity"]["n"] is None:
        plain["sparsity"] = {**plain["sparsity"], "n": 2, "m": 4}
    composed, keys, problems = OmegaConf.create(plain), {*plain, *flatten(plain)}, list[str]()
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key == "sparsity":
            with refused(f"sparsity={value}: ", PatternError):
                node = options_of.node(key, "dense") if value == "dense" else {}
                value = node or options_of.ratio(Pattern.parse(str(value)))
            OmegaConf.update(composed, key, value, merge=True)
        elif key in options_of.CLASSES:
            line = (
                f"{override.input_line}: the run has its own {key}; its keys ({key}.…) can change"
            )
            problems.append(line)
        elif key in keys:
            OmegaConf.update(composed, key, value, merge=False)
        else:
            problems.append(suggestions.line(key, keys))
    raise_all(problems)
    config = schema.check(composed)
    raise_all(schema.refusals({**config.plain, "recipe": plain["recipe"]}))
    return config


# --- the run --------------------------------------------------------------------------------------


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
    result = results.write(outcome, config, run_id, command, folder, (device, precision))
    if result["status"] != "finished":
        raise RunError(result["error"])
    return result


def calibration(task: Task, samples: int, accumulate: int) -> Iterator[Batch]:
    """The first samples that a training with this seed would see, in micro-batches; the last may be
    smaller. ConfigError where an epoch has fewer."""
    remaining = samples
    for index in range(task.batches_per_epoch):
        for batch in task.micro_batches(0, index, accumulate):
            count = len(batch[0])
            yield batch if count <= remaining else tuple(part[:remaining] for part in batch)
            remaining -= count
            if remaining <= 0:
                return
    total = samples - remaining
    raise ConfigError(f"samples={samples}: an epoch of the training split has {total}")


def _metrics(task: Task, model: nn.Module, prefix: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for split, name in (("val", "eval"), ("test", "test")):
        if split == "test" and not task.has_test:
            continue
        scores = task.evaluate(model, split)
        metrics |= {f"{name}/{prefix}{key}": value for key, value in scores.items()}
        if not math.isfinite(scores[task.metric]):
            what = "before it is pruned" if prefix else "once it is pruned"
            raise RunError(f"the network's {task.metric} is not finite {what}")
    return metrics
