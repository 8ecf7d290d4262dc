"""What a run folder says of its run, whether that has finished or not; without pandas."""

from __future__ import annotations

import re
from pathlib import Path

from nmrun.errors import ConfigError
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.words.identity import completed
from nmrun.lab.words.schema import flatten
from nmrun.patterns import written
from nmrun.ranges import shown

OUTSIDE_BRACKETS = re.compile(r",(?![^\[{(]*[\]})])")


def of(folder: Path) -> dict[str, str]:
    """The settings of a run by key: groups by their name (``recipe``), ``sparsity`` as ``2:4`` or
    ``dense``, all else by its dotted key.

    Raises:
        ConfigError: where the folder is no run's.
    """
    config = RunFolder(folder).config
    if not config or "sparsity" not in config:
        why = "there is no such folder" if not folder.is_dir() else "no run is in it"
        raise ConfigError(f"{folder}: {why}")
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
