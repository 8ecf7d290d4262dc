"""The launchers of sweeps: what nmrun knows of each one of Hydra's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GROUP = "hydra/launcher"


@dataclass(frozen=True)
class Launcher:
    """What differs between launchers.

    ``extra`` is the extra of nmrun that has it, as Hydra's ``plugin``. ``needs`` is a program that
    it calls. ``here``: its jobs run on this machine. ``queues``: its jobs outlive the command.

    ``signals`` is how jobs get a signal that the sweep's process gets: ``passed`` on to processes
    that this has started, or ``read`` by them in the sweep's record. None: they do not.
    """

    extra: str
    plugin: str
    needs: str | None = None
    here: bool = False
    signals: Literal["passed", "read"] | None = None
    queues: bool = False


LAUNCHERS = {
    "joblib": Launcher("launchers", "joblib", here=True, signals="passed"),
    "submitit_local": Launcher("launchers", "submitit_local", here=True),
    "slurm": Launcher("launchers", "submitit_slurm", needs="sbatch", queues=True),
    "submitit_slurm": Launcher("launchers", "submitit_slurm", needs="sbatch", queues=True),
    "ray": Launcher("ray", "ray", signals="read"),
    "ray_aws": Launcher("ray", "ray_aws"),
}


def spelt_out(word: str) -> str:
    """The word for Hydra that ``launcher=slurm`` or ``launcher.partition=gpu`` stands for; any other
    as it is."""
    named = re.sub(r"^launcher=", f"{GROUP}=", word)
    return re.sub(r"^([+~]*)launcher\.", r"\1hydra.launcher.", named)
