"""Weights & Biases: online for who is logged in, else offline, never with a prompt."""

from __future__ import annotations

import netrc
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from nmrun.lab.train.loggers import Run

INIT_TIMEOUT = 10.0  # seconds that an online W&B may take to answer, once a process
# seconds that it may take to upload the rest at the end; what is left stays on disk for wandb sync
FINISH_TIMEOUT = 60.0
_unreachable = (
    False  # W&B did not answer in this process: do not wait for it again in the next run of a sweep
)


class WandB:
    """A run of W&B.

    Args:
        run: W&B's own.
        say: tells at the end how an offline run is uploaded; None: nothing is told.
    """

    def __init__(self, run: Any, say: Callable[[str], None] | None = None) -> None:
        self._run, self._say = run, say

    def log(self, row: dict[str, Any]) -> None:
        """Log a row at its step."""
        self._run.log(row, step=row["step"])

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Write the summary, and upload what is left."""
        self._run.summary.update(summary)
        self._run.finish(exit_code=exit_code)
        if self._say is not None:
            place = os.path.relpath(Path(self._run.dir).parent)
            self._say(f"W&B: offline; wandb sync {shlex.quote(place)} uploads it")


def begin(run: Run) -> WandB | None:
    """Begin a run of W&B with the run's id; None where WANDB_MODE is ``disabled``."""
    global _unreachable
    track = run.config["track"]
    mode = os.environ.get("WANDB_MODE") or track["mode"]
    if mode == "disabled":
        return None
    known = logged_in()
    online = mode in ("online", "auto") and known
    if mode == "online" and not online:
        run.say("W&B: not logged in (wandb login), tracking offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    arguments: dict[str, Any] = {
        **{key: track[key] for key in ("project", "entity", "notes")},
        "group": track["group"] or run.sweep,
        "id": run.id,
        "name": run.name,
        "tags": run.tags,
        "dir": str(run.folder),
        "config": run.config,
        "settings": _settings(wandb, track),
        "reinit": "finish_previous",
    }
    if online and not _unreachable:
        try:
            # without resume, a run of the same id is replaced: that is force=true
            resume: Any = "allow" if run.history else None
            return WandB(wandb.init(mode="online", resume=resume, **arguments))
        except Exception as error:
            _unreachable = True
            wandb.teardown(exit_code=1)  # its service would hold the run's id
            run.say(f"W&B cannot be reached ({type(error).__name__}): tracking offline")
    # An offline run cannot be taken up again: replace it by one with the whole history.
    for old in (run.folder / "wandb").glob("*run-*"):
        shutil.rmtree(old, ignore_errors=True)
    # by default all who have no login track offline, and need not be told
    say = None if mode == "auto" and not known else run.say
    begun = WandB(wandb.init(mode="offline", **arguments), say)
    for row in run.history:
        begun.log(row)
    import pandas  # noqa: F401  # else W&B imports it for the summary, when all else is done

    return begun


def _settings(wandb: Any, track: dict[str, Any]) -> Any:
    """What is logged here is sent; the state of git, the console and statistics of the machine if
    they are asked for, source code never.
    """
    wanted: dict[str, Any] = {
        "silent": True,
        "console": "wrap" if track["console"] else "off",
        "init_timeout": INIT_TIMEOUT,
        "finish_timeout": FINISH_TIMEOUT,
        "disable_code": True,
        "disable_git": not track["git"],
        "x_disable_stats": not track["system"],
        "x_disable_meta": not (track["system"] or track["git"]),
        "x_disable_machine_info": not track["system"],
        "x_save_requirements": False,
    }
    known = wandb.Settings.model_fields  # these differ between versions
    return wandb.Settings(**{key: value for key, value in wanted.items() if key in known})


def logged_in() -> bool:
    """Whether there is a key, in the environment or in netrc. Asks no network and no person."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
