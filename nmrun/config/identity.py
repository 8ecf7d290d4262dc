"""Which run this is: a short hash of all that changes its result, and the folder that follows from
it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nmrun.settings.config import Config

GROUPS = ("dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "trainer", "seed")
# where and how it runs and what it tells
IRRELEVANT = {
    "dataset": {"workers"},
    "trainer": {
        *("device", "threads", "on_oom", "distributed", "acceleration"),
        *("log_every", "diagnose_every", "checkpoint_every"),
    },
}
# what decides how many steps a budget of seconds buys
SPEED = {"device", "threads", "distributed", "acceleration"}


def identity(config: Config) -> str:
    """Ten hexadecimal digits. Equal for two commands exactly when they ask for the same training."""
    relevant = {}
    for group in GROUPS:
        value = config.plain[group]
        if isinstance(value, dict):
            ignored = IRRELEVANT.get(group, set())
            if str(value.get("budget")).startswith("seconds:"):
                ignored = ignored - SPEED
            value = {k: v for k, v in value.items() if k not in ignored}
        relevant[group] = value
    overrides = config.sparsity.overrides
    if overrides and len(overrides) > 1:  # the first that matches counts
        relevant["order"] = list(overrides)
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:10]


def run_folder(config: Config) -> Path:
    """``<output_dir>/<dataset>/<model>/<recipe>/<ratio>/s<seed>-<id>``: no colon, space or
    backslash in it.
    """
    slug = "dense" if config.pattern is None else config.pattern.slug
    place = (
        Path(config.output_dir)
        / config.dataset.name
        / config.model.name
        / config.recipe.name
        / slug
    )
    return place / f"s{config.seed}-{identity(config)}"


def finished(folder: Path) -> dict[str, Any] | None:
    """The result of a run that has finished in this folder; None if none has."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("status") == "finished" else None
