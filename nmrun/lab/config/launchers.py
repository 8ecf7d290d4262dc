"""The launchers of sweeps: what nmrun knows of each one of Hydra's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GROUP = "hydra/launcher"


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


def of(target: str) -> Launcher:
    """What is known of the launcher of this class, under whatever name."""
    return next((each for each in LAUNCHERS.values() if each.target == target), OTHER)


def spelt_out(word: str) -> str:
    """The word for Hydra that ``launcher=slurm`` or ``launcher.partition=gpu`` stands for; any other
    as it is."""
    named = re.sub(r"^launcher=", f"{GROUP}=", word)
    return re.sub(r"^([+~]*)launcher\.", r"\1hydra.launcher.", named)
