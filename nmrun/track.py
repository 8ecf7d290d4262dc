"""What a run writes down: ``metrics.jsonl`` always, W&B besides where it is wanted and at hand."""

from __future__ import annotations

import json
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from nmrun.schema import Config, flatten


class Tracker:
    """One object a line into ``metrics.jsonl``, and the same into W&B if ``wandb_run`` is given."""

    def __init__(self, folder: Path, from_step: int, wandb_run: Any = None) -> None:
        self._path = folder / "metrics.jsonl"
        self._wandb = wandb_run
        kept = rows_up_to(self._path, from_step) if from_step else []
        self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a")

    def log(self, row: dict[str, Any]) -> None:
        """``step`` and what was measured after that many optimizer steps."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def finish(self, summary: dict[str, Any], status: str) -> None:
        """Close the files and end the W&B run with this summary."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.summary.update({"status": status, **flatten(summary)})
            self._wandb.finish(exit_code=0 if status == "finished" else 1)


def rows_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows a resumed run keeps: those up to the step of its checkpoint. A last line cut off by a kill is dropped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= step:
            rows.append(row)
    return rows


def start_wandb(config: Config, ident: str, folder: Path, sweep: str | None) -> tuple[Any, str]:
    """A W&B run and where it goes, or ``(None, why not)``. Never asks, never raises, and waits for a network 10 s at most.

    Offline unless logged in (an API key in the environment or in ~/.netrc); ``WANDB_MODE`` and ``track.mode`` are honoured.
    """
    track = config.track
    if track["name"] != "wandb":
        return None, ""
    mode = os.environ.get("WANDB_MODE") or track["mode"]
    if mode == "auto":
        mode = "online" if logged_in() else "offline"
    if mode == "disabled":
        return None, ""
    os.environ["WANDB_SILENT"] = "true"
    try:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", init_timeout=10, x_disable_stats=True, x_disable_meta=True, save_code=False, disable_git=True
        )
        options: dict[str, Any] = {
            "project": track["project"],
            "entity": track["entity"],
            "id": f"{ident}-s{config.seed}",
            "name": f"{config.recipe['name']} {config.pattern or 'dense'} s{config.seed}",
            "group": track["group"] or sweep,
            "config": config.plain,
            "dir": str(folder),
            "settings": settings,
            "reinit": "finish_previous",
        }
        try:
            run = wandb.init(mode=mode, resume="allow" if mode == "online" else None, **options)
        except Exception as error:
            if mode != "online":
                raise
            run = wandb.init(mode="offline", **options)
            return run, f"offline, since the server did not answer ({type(error).__name__})"
        return run, mode
    except Exception as error:  # tracking must never cost a run
        return None, f"off: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def logged_in() -> bool:
    """Whether W&B would find an API key without asking anyone."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
