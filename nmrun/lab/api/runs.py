"""``nmrun.run`` and ``nmrun.sweep``: what a command line without a verb does, in this process, which is
left as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from nmrun import recipes
from nmrun.errors import ConfigError, RunError, refused
from nmrun.lab import arguments, output
from nmrun.lab.compare.runs import collect, summary
from nmrun.lab.config import command_line, composition
from nmrun.lab.keys import options
from nmrun.lab.records import sweep as record
from nmrun.lab.records.sweep import recorded
from nmrun.lab.runs.run_folder import METRICS, RunFolder, metrics_of
from nmrun.lab.sweeps import jobs
from nmrun.lab.train import checkpoint
from nmrun.lab.train.track import MLFLOW_WAITS
from nmrun.patterns import written
from nmrun.recipes.base import Recipe

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


# --- the process ----------------------------------------------------------------------------------

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "WANDB_SILENT", *MLFLOW_WAITS)


_turn = threading.RLock()


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Leave a process as it was: its random numbers, torch's threads, determinism and CUDA device,
    and environment variables. Inside, torch computes by its defaults. Threads enter in turn: these
    are the whole process's, and so is Hydra."""
    with _turn, _defaults():
        variables = {name: os.environ.get(name) for name in VARIABLES}
        random, threads = checkpoint.random_state(), torch.get_num_threads()
        mode = torch.get_deterministic_debug_mode()
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        try:
            yield
        finally:
            for name, value in variables.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            checkpoint.restore_random_state(random)
            torch.set_num_threads(threads)
            torch.set_deterministic_debug_mode(mode)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            if device is not None:
                torch.cuda.set_device(device)
            elif torch.cuda.is_initialized():  # as CUDA would have begun without the run
                torch.cuda.manual_seed_all(torch.initial_seed())


@contextlib.contextmanager
def _defaults() -> Iterator[None]:
    """Let torch compute as in a new process, whatever the caller has entered: without them the same
    settings would train other numbers, or none."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtype, caches = torch.get_default_dtype(), torch.is_autocast_cache_enabled()
    device: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch.empty(0).device.type != "cpu":  # entered, it makes every call a little slower
        device = torch.device("cpu")
    # a run's own autocast forgets the weights of before a step where it is the outermost
    depth = torch.autocast_increment_nesting() - 1
    with torch.inference_mode(False), torch.enable_grad(), device:
        try:
            torch.set_default_dtype(torch.float32)
            for kind in kinds:
                torch.set_autocast_enabled(kind, False)
            torch.set_autocast_cache_enabled(True)
            while torch.autocast_decrement_nesting():
                pass
            yield
        finally:
            for _ in range(depth):
                torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(caches)
            for kind in kinds:
                torch.set_autocast_enabled(kind, True)
            torch.set_default_dtype(dtype)


# --- runs and sweeps --------------------------------------------------------------------------------


@unchanged()
def run(overrides: str | Sequence[str] | None = None, **settings: Any) -> Result:
    """Do one run, as ``nmrun [overrides]`` does. ::

        nmrun.run("recipe=step sparsity=2:8", seed=3, trainer={"epochs": 2})

    A run that has finished is skipped. One that was interrupted goes on from its checkpoint. The
    process is left as it was: working folder, logging, Hydra, random numbers, torch's threads and
    determinism. Runs and sweeps in threads of one process wait for each other. SIGINT and SIGTERM
    end the training with KeyboardInterrupt or SystemExit, once the checkpoint is saved.

    Args:
        overrides: words of the command line, ``--config-dir DIR`` among them. A text is split as a
            shell splits it.
        settings: more overrides, which win: ``seed=3`` or ``trainer={"epochs": 2}``. A text is what
            one would type after ``key=``. ``recipe`` takes an object or a class of one's own too.

    Raises:
        ConfigError: with all that is wrong with the settings, one line each.
        RunError: where the run failed. Its folder has the traceback in ``run.log``.
    """
    typed, config_dir = parse(overrides, settings, multirun=False)
    ((words, config),) = jobs.checked(typed, multirun=False, config_dir=config_dir).jobs
    outcome = jobs.one(config, command=command_line.typed(config_dir, words))
    raise_interrupt(outcome)
    if outcome["status"] not in ("finished", "skipped", "planned"):
        raise RunError(" ".join(f"{outcome['error']}: {outcome['folder']}".split()))
    folder = Path(outcome["folder"]).absolute()
    return Result(outcome["status"], config.plain, metrics_of(outcome), folder)


@unchanged()
def sweep(overrides: str | Sequence[str]) -> pd.DataFrame:
    """Do the runs of a sweep one after the other, as ``nmrun -m overrides`` does without a launcher. ::

        nmrun.sweep("recipe=step,sr_ste sparsity=2:4,1:8 seed=0,1,2")

    Finished runs are skipped, and a failed one does not stop the others. Signals are handled, and the
    process is left as it was, as with :func:`run`.

    Returns:
        A row for each run that has a result, failed ones too, with the columns of
        :func:`nmrun.runs`.

    Raises:
        ConfigError: with all that is wrong, one line each, before anything is run.
        RunError: where no run has a result.
    """
    typed, config_dir = parse(overrides, {}, multirun=True)
    asked = jobs.checked(typed, multirun=True, config_dir=config_dir)
    if asked.launcher != "basic":
        line = f"launcher={asked.launcher}: Hydra's launchers are for the command line, nmrun -m"
        raise ConfigError(line)
    command = command_line.typed(config_dir, ["-m", *typed])
    folders: list[Path] = []
    with recorded(asked, command) as folder:
        for outcome in jobs.run_jobs(folder, asked.jobs, config_dir, folders.append):
            raise_interrupt(outcome)
        print(record.summary(folder)[0])
    runs = collect(folders)
    if runs.empty:
        if asked.dry:
            return runs
        raise RunError("no run of this sweep has a result")
    return summary(runs)


def raise_interrupt(outcome: dict[str, Any]) -> None:
    """Raise KeyboardInterrupt or SystemExit where a signal ended a run."""
    if outcome["status"] == "interrupted":
        if outcome["signal"] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + int(outcome["signal"]))


# --- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Result:
    """What a run gave: its status, config, metrics and folder.

    Attributes:
        status: ``finished``; ``skipped`` if it had finished before; ``planned`` for ``dry=true``,
            which trains nothing and has no folder.
        config: all settings of the run, by group and key.
        metrics: those of the last weights by name (``test/accuracy``), and under ``best/`` those of
            the best weights by validation. Accuracies are from 0 to 1. None for what was not
            finite.
        folder: where its files are, as an absolute path.
    """

    status: str
    config: dict[str, Any]
    metrics: dict[str, float | None]
    folder: Path

    def history(self) -> pd.DataFrame:
        """What was logged while the run trained: a row for each line of ``metrics.jsonl``.

        Raises:
            RunError: where there is no such file, or it was changed since the run finished.
        """
        from nmrun.lab.compare.runs import frame

        if not (self.folder / METRICS).is_file():
            raise RunError(
                f"{self.folder / METRICS} is missing: nothing was logged there, or it was removed"
            )
        return frame(RunFolder(self.folder).rows())

    def model(self) -> nn.Module:
        """The run's model with its last weights, on the CPU and in evaluation mode. The weights are
        checked to be N:M.

        Raises:
            RunError: where the run left no weights, or they cannot be loaded.
        """
        from nmrun.lab.export import finished_run

        try:
            with unchanged():  # building draws random numbers
                run = finished_run.read(self.folder)
                # what was asked for here is trusted, and no more
                trusted = arguments.code_of(run.result["config"]) == arguments.code_of(self.config)
                run = replace(run, trusted=trusted)
                return finished_run.network(run)[0]
        except (ValueError, RuntimeError) as error:
            raise RunError(" ".join(str(error).split())) from None

    def __repr__(self) -> str:
        config, last = self.config, self.metrics.items()
        lines = {
            "nmrun.Result": self.status,
            **{group: str(config[group]["name"]) for group in ("dataset", "model", "recipe")},
            "sparsity": written(config["sparsity"]),
            "seed": str(config["seed"]),
            **{name: "-" if v is None else f"{v:.4g}" for name, v in last if name[:5] != "best/"},
            "folder": str(self.folder),
        }
        return "\n".join(output.aligned([*lines.items()]))


# --- arguments of Python as words -----------------------------------------------------------------


def parse(
    overrides: str | Sequence[str] | None, settings: Mapping[str, Any], multirun: bool
) -> tuple[list[str], str | None]:
    """The overrides that ``overrides`` and ``settings`` (see :func:`words_of`), which win, are; and
    the folder of more configs.

    ConfigError for another option of the command line, and for values that no override can have.
    """
    with refused(f"{overrides}: ", ValueError):
        words = shlex.split(overrides) if isinstance(overrides, str) else list(overrides or [])
    given = composition.options([*words, *words_of(settings)])
    allowed = {"overrides", "config_dir"} | ({"multirun"} if multirun else set())
    for name in (name for name, value in vars(given).items() if value and name not in allowed):
        hint = "; nmrun.sweep does several runs" if name == "multirun" else ""
        raise ConfigError(f"--{name.replace('_', '-')}: not for Python{hint}")
    return given.overrides, given.config_dir


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as overrides; a dictionary has the keys of a group, ``{"trainer": {"epochs": 3}}``
    or ``{"trainer.epochs": 3}``. A text is what one would type after ``key=``. ``recipe`` may be an
    object or a class."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "recipe" and isinstance(value, Recipe | type):
            flat |= _recipe(value)
            continue
        group = isinstance(value, dict) and key in options.GROUPS
        flat |= {f"{key}.{name}": item for name, item in value.items()} if group else {key: value}
    return [_word(key, value) for key, value in flat.items()]


def _recipe(recipe: Recipe | type) -> dict[str, Any]:
    """The settings of a recipe: its name or the path of its class, and the fields that are not at
    their defaults. ConfigError for one that no config can say."""
    kind = recipe if isinstance(recipe, type) else type(recipe)
    path = f"{kind.__module__}.{kind.__qualname__}"
    if not issubclass(kind, Recipe):
        raise ConfigError(f"recipe={kind.__name__} is not a subclass of nmrun.recipes.base.Recipe")
    try:
        found: type | None = recipes.find(path)
    except ConfigError:
        found = None
    if found is not kind:
        raise ConfigError(
            f"recipe={kind.__name__}: a run's config has {path}, which is another class or none; "
            "define it outside of functions, and make the recipe anew after a change"
        )
    named = {where: name for name, where in {**recipes.installed(), **recipes.RECIPES}.items()}
    settings = {"recipe": named[path]} if path in named else {"recipe._target_": path}
    if isinstance(recipe, type):
        return settings
    keys = [key.name for key in dataclasses.fields(recipe) if key.init]
    values = {key: getattr(recipe, key) for key in keys}
    with refused(f"recipe={kind.__name__} cannot be made from its fields: ", TypeError, ValueError):
        twin = kind(**values)
    if lost := sorted(vars(recipe).keys() - vars(twin).keys()):
        raise ConfigError(
            f"recipe={kind.__name__}: {', '.join(lost)}: no field, so no config has it"
        )
    usual = options.defaults(options.fields(cast(Any, kind)))
    return settings | {
        f"recipe.{key}": value
        for key, value in values.items()
        if command_line.word(f"recipe.{key}", value)
        != command_line.word(f"recipe.{key}", usual[key])
    }


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        read, problems = command_line.parsed([f"{key}={value}"])
        if not problems and not read[0].is_sweep_override():
            return f"{key}={value}"
    return command_line.word(key, value)
