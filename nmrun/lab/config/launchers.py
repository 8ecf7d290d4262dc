"""What the words of a command, and a user's files, say to Hydra itself: which launcher runs the jobs
of a sweep, and with what settings. What would do nothing here, or fail later, gets a line.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun.errors import extra
from nmrun.lab.config import command_line, suggestions
from nmrun.lab.config.command_line import LAUNCHER
from nmrun.lab.config.composition import composing
from nmrun.ranges import Check, whole
from nmrun.registry import no_such

# of Hydra's own keys those that it takes with any value, and then fails
HYDRAS = {
    "hydra.launcher.n_jobs": Check("1 or more, or -1 for all cores", lambda value: value != 0),
    "hydra.sweeper.max_batch_size": Check(
        "1 or more, or null for all jobs at once", whole(1, optional=True).holds
    ),
    "hydra.sweeper.params": Check(
        "values by key, such as {seed: '0,1'}", lambda value: isinstance(value, dict | None)
    ),
    "hydra.job.chdir": Check("false; runs go to output_dir=...", lambda value: value is not True),
}
# those that would do nothing here
REFUSED = {
    **dict.fromkeys(
        ("hydra/sweeper", "hydra.sweeper._target_"),
        "nmrun -m has a sweeper of its own; nmrun tune searches settings",
    ),
    **dict.fromkeys(
        ("hydra.run.dir", "hydra.sweep.dir"), "runs go to output_dir=...; leave it out"
    ),
    "hydra.searchpath": "--config-dir adds a folder of configs",
    "hydra.mode": "nmrun -m is what makes a sweep; leave it out",
}
OF_SWEEPS = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
# of Hydra's settings those with keys of their own, and those that follow from the command
PARTS = ("job", "run", "sweep", "launcher", "sweeper")
OF_COMMAND = {"runtime", "overrides", "job.override_dirname"}


@dataclass(frozen=True)
class Launcher:
    """What differs between launchers.

    ``extra`` is the extra of nmrun that has it, empty for Hydra's own; ``plugin`` is Hydra's name of
    it, and ``target`` its class. ``needs`` is a program that it calls. ``here``: its jobs run on this
    machine. ``queues``: its jobs outlive the command.

    ``signals`` is how jobs get a signal that the sweep's process gets: ``passed`` on to processes
    that this has started, or ``read`` by them in the sweep's record. None: they do not.
    """

    extra: str
    plugin: str
    target: str
    needs: str | None = None
    here: bool = False
    signals: Literal["passed", "read"] | None = None
    queues: bool = False


OTHER = Launcher("", "", "")  # of which nothing is known
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."
SLURM = Launcher(
    "launchers", "submitit_slurm", f"{SUBMITIT}SlurmLauncher", needs="sbatch", queues=True
)
RAY = "hydra_plugins.hydra_ray_launcher."
LAUNCHERS = {
    "basic": Launcher("", "basic", BASIC, here=True),
    "joblib": Launcher("launchers", "joblib", JOBLIB, here=True, signals="passed"),
    "submitit_local": Launcher(
        "launchers", "submitit_local", f"{SUBMITIT}LocalLauncher", here=True, signals="read"
    ),
    "slurm": SLURM,
    "submitit_slurm": SLURM,
    "ray": Launcher("ray", "ray", f"{RAY}ray_launcher.RayLauncher", signals="read"),
    "ray_aws": Launcher("ray", "ray_aws", f"{RAY}ray_aws_launcher.RayAWSLauncher", signals="read"),
}


def launcher_of(target: str) -> Launcher:
    """What is known of the launcher of this class, under whatever name."""
    return next((each for each in LAUNCHERS.values() if each.target == target), OTHER)


def speaks_of_hydra(config_dir: str | None) -> bool:
    """Whether the files of a folder of configs speak of Hydra, by any word: of its launcher, or of more
    values to sweep."""
    if config_dir is None:
        return False
    files = [file for file in Path(config_dir).rglob("*.yaml") if os.access(file, os.R_OK)]
    return (Path(config_dir) / "hydra").is_dir() or any(
        "hydra" in file.read_text(errors="replace") for file in files if file.is_file()
    )


class HydraWords(NamedTuple):
    """What the words of a sweep, or of a run, ask of Hydra: a launcher, with what is ``known`` of it, in
    ``words``. The other overrides are ``of_jobs``, also those that the user's files sweep over."""

    launcher: str
    known: Launcher
    words: list[str]
    of_jobs: list[Override]
    problems: list[str]


def hydra_words(overrides: list[Override], multirun: bool, speaks: bool) -> HydraWords:
    """Read what is asked of Hydra. ``speaks``: whether any word or file may be for it."""
    loader = GlobalHydra.instance().config_loader()
    named = [command_line.values(o, []) for o in overrides if o.key_or_group == LAUNCHER]
    launcher = ",".join(map(str, named[-1])) if named else "basic"
    known = LAUNCHERS.get(launcher, OTHER)
    said = [(str(o.input_line), o.key_or_group, o.value()) for o in overrides]
    problems = _refused(said, heard=True) + _not_here(launcher, loader)
    settings = _settings(overrides) if speaks and not problems else None
    if settings is not None:
        if multirun:  # files may choose the launcher too
            launcher = str(settings.runtime.choices[LAUNCHER])
            known = launcher_of(OmegaConf.select(settings, "launcher._target_"))
            problems = _not_here(launcher, loader)
        heard = launcher != "basic"
        problems += _refused(said, heard) or _refused(_in_files(settings), heard)
        params = OmegaConf.select(settings, "sweeper.params")
        if multirun and isinstance(params, Mapping):
            swept = [command_line.parse(f"{key}={values}") for key, values in params.items()]
            overrides = [*swept, *overrides]
    if launcher != "basic" and not multirun and not problems:
        problems.append(f"launcher={launcher}: launchers are for sweeps; add -m")
    for override in overrides:
        group, _, leaf = override.key_or_group.rpartition(".")
        if group == "hydra.launcher" and (launcher == "basic" or leaf == "jobs"):
            how = suggestions.INSTEAD["--jobs"]
            problems.append(f"{override.input_line}: no such key; {how}")
    hydras = [o for o in overrides if command_line.is_hydras(o.key_or_group)]
    words = [override.input_line or "" for override in hydras]
    if problems:  # then what is said to Hydra's launcher is left out
        out = (*OF_SWEEPS, *REFUSED)
        words = [word for word in words if not word.lstrip("+~").startswith(out)]
    return HydraWords(launcher, known, words, [o for o in overrides if o not in hydras], problems)


def _refused(said: Iterable[tuple[str, str, Any]], heard: bool) -> list[str]:
    """A line for each word to Hydra, or setting of a file, that would do nothing here or fail later;
    each as it is called, with its key and value. ``heard``: whether one of Hydra's launchers runs the
    jobs, so that most do something."""
    problems = []
    for called, key, value in said:
        if key in REFUSED:
            problems.append(f"{called}: {REFUSED[key]}")
        elif key in HYDRAS and not HYDRAS[key].holds(value):
            problems.append(f"{called}: it takes {HYDRAS[key].allowed}")
        elif command_line.is_hydras(key) and not heard and not key.startswith(OF_SWEEPS):
            how = "Hydra hears it where a launcher of its own runs a sweep's jobs"
            problems.append(f"{called}: {how}")
    return problems


def _settings(overrides: Sequence[Override]) -> DictConfig | None:
    """Hydra's own settings, by words and by files of the user's. None where they cannot be composed,
    which the jobs then tell."""
    fixed = [o.input_line or "" for o in overrides if not o.is_sweep_override()]
    try:
        return compose("nmrun", fixed, return_hydra_config=True).hydra
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError, AttributeError):
        return None


def _in_files(settings: DictConfig) -> Iterator[tuple[str, str, Any]]:
    """What differs from Hydra's settings of every command. It stands in files, where no word says
    it."""
    usual, here = _usual(), _by_key(settings)
    for key in {**usual, **here}:
        if usual.get(key) != (value := here.get(key)):
            yield f"{key} in a file of yours", key, value


@functools.cache
def _usual() -> dict[str, Any]:
    with composing():
        return _by_key(compose("nmrun", [], return_hydra_config=True).hydra)


def _by_key(settings: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(settings, resolve=False)
    parts = {part: plain.pop(part, None) or {} for part in PARTS}
    flat = plain | {f"{part}.{key}": parts[part][key] for part in parts for key in parts[part]}
    return {f"hydra.{key}": value for key, value in flat.items() if key not in OF_COMMAND}


def _not_here(launcher: str, loader: ConfigLoader) -> list[str]:
    """A line for a launcher that does not exist, is not installed, or has no cluster here."""
    installed = loader.get_group_options(LAUNCHER)
    known = LAUNCHERS.get(launcher, OTHER)
    if known is OTHER and launcher not in installed:
        names = sorted({*installed, *LAUNCHERS})
        return [f"launcher={launcher}: {no_such('launcher', launcher, names)}"]
    if known is not OTHER and known.plugin not in installed:
        return [f"launcher={launcher} is not installed: {extra(known.extra)}"]
    if known.needs and shutil.which(known.needs) is None:
        return [f"launcher={launcher}: there is no {known.needs} here; joblib needs no cluster"]
    return []
