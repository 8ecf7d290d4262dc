"""The launcher of a command line: plug-ins of Hydra, which come with extras."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override

from nmrun.lab.words import command_line, suggestions

GROUP = "hydra/launcher"
WORDS = (GROUP, "hydra.launcher")  # what begins an override for one
# the extra of nmrun that a launcher comes with
EXTRAS = {
    **dict.fromkeys(("joblib", "submitit_local", "submitit_slurm"), "launchers"),
    **dict.fromkeys(("ray", "ray_aws"), "ray"),
}
HERE = ("basic", "joblib", "submitit_local")  # launchers whose jobs run on this machine


def asked_for(sweeps: Sequence[Sequence[str]], config_dir: str | None) -> bool:
    """Whether anything is said to Hydra itself, by overrides or in a folder of more configs, such as
    a launcher or the environment of its jobs: then Hydra launches them.
    """
    if any(map(command_line.is_hydras, itertools.chain(*sweeps))):
        return True
    files = [] if config_dir is None else Path(config_dir).rglob("*.yaml")
    return any(
        b"hydra" in file.read_bytes()
        for file in files
        if file.is_file() and os.access(file, os.R_OK)
    )


def asked(overrides: Sequence[Override], loader: ConfigLoaderImpl) -> tuple[str, list[str]]:
    """Find the launcher that a command line asks for.

    Args:
        overrides: of the command line.
        loader: Hydra's, which knows what is installed.

    Returns:
        Its name, ``basic`` unless another is asked for; and a line for what there is not.
    """
    name, problems = "basic", []
    for override in overrides:
        if override.key_or_group == "hydra/sweeper":
            problems.append(
                f"{override.input_line}: nmrun -m has a sweeper of its own; nmrun tune searches settings"
            )
        if override.key_or_group != GROUP:
            continue
        name, installed = str(override.value()), loader.get_group_options(GROUP)
        if name not in installed and name in EXTRAS:
            problems.append(f"{GROUP}={name} is not installed: pip install 'nmrun[{EXTRAS[name]}]'")
        elif name not in installed:
            problems.append(
                suggestions.no_option(GROUP, GROUP, name, sorted({*installed, *EXTRAS}))
            )
    return name, problems
