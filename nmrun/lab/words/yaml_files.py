"""A user's YAML files: those of ``--config-dir``, and what is wrong with one that cannot be read."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from nmrun.errors import ConfigError


def read(file: Path | Traversable, what: str) -> Any:
    """The content of a file.

    Args:
        file: the file.
        what: its name, for the error.

    Raises:
        ConfigError: where it cannot be read.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(unreadable(error, what)) from None


def unreadable(error: OSError | UnicodeDecodeError | yaml.YAMLError, what: str = "") -> str:
    """The line for a file that could not be read.

    Args:
        error: what reading it raised.
        what: its name; without it that of the error, where this has one.
    """
    if isinstance(error, OSError):
        return f"{what or error.filename}: {error.strerror or error}"
    if isinstance(error, UnicodeDecodeError):
        return f"{what}: not a text in UTF-8: {error.reason} at byte {error.start}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{what}: not YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark
    found = ", ".join(filter(None, (error.context, error.problem)))
    return f"{what or mark.name}, line {mark.line + 1}: not YAML: {found}"


def of_folder(config_dir: str | None) -> dict[str, list[Path]]:
    """The configs in a folder of the user's own, by group.

    Raises:
        ConfigError: where there is no such folder.
    """
    if config_dir is None:
        return {}
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    folders = sorted(folder for folder in Path(config_dir).iterdir() if folder.is_dir())
    found = {folder.name: sorted(folder.glob("*.yaml")) for folder in folders}
    return {
        group: [file for file in files if file.is_file()] for group, files in found.items() if files
    }
