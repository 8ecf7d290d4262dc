"""What a run folder says of its run, whether that has finished or not; without pandas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from nmrun.config.identity import completed, result_in
from nmrun.config.schema import flatten
from nmrun.errors import ConfigError
from nmrun.patterns import written
from nmrun.settings.reader import shown

OUTSIDE_BRACKETS = re.compile(r",(?![^\[{(]*[\]})])")


def of(folder: Path) -> dict[str, str]:
    """The settings of a run by key: groups by their name (``recipe``), ``sparsity`` as ``2:4`` or
    ``dense``, all else by its dotted key.

    Raises:
        ConfigError: where the folder is no run's.
    """
    config = result_in(folder).get("config") or _typed(folder)
    if not config or "sparsity" not in config:
        said = "there is no such folder" if not folder.is_dir() else "no run is in it"
        raise ConfigError(f"{folder}: {said}")
    named = {key: value.get("name") for key, value in config.items() if isinstance(value, dict)}
    flat = {
        **{key: name for key, name in named.items() if name is not None},
        "sparsity": written(config["sparsity"]),
        **{key: value for key, value in flatten(completed(config)).items() if key[-5:] != ".name"},
    }
    return {
        key: shown(value)
        for key, value in flat.items()
        if key not in ("sparsity.n", "sparsity.m", "sparsity.v")
    }


def _typed(folder: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def alternatives(condition: str) -> tuple[str, list[str]]:
    """The key of a condition and the values that fit: ``recipe=ste,sr_ste`` names two, and
    ``optimizer.betas=[0.9,0.98]`` one."""
    key, _, values = condition.partition("=")
    return key, [value.strip() for value in OUTSIDE_BRACKETS.split(values)]


def same(a: str, b: str) -> bool:
    """Whether two values are equal as texts or as numbers."""
    try:
        return a == b or float(a) == float(b)
    except ValueError:
        return False
