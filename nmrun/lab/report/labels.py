"""Labels of rows and columns: config values as a command line has them."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from nmrun import ranges

# the labels of a row or of a column, one for each config key that it stands for
Key = tuple[str, ...]

BREAK = re.compile(r"\s*\n\s*")
LONG = 8  # characters of a number


def label(value: Any) -> str:
    """A config value as a command line has it, on one line; ``-`` for a key that the run has not."""
    return "-" if value != value else BREAK.sub(" ", ranges.shown(value))


def short(label: str) -> str:
    """A label with four digits where it is a long number."""
    with contextlib.suppress(ValueError):
        return f"{float(label):.4g}" if len(label) > LONG else label
    return label


def named(key: str, label: str) -> str:
    """A label that says of what it is, where it is a setting: ``lr=0.001``."""
    return f"{key.rpartition('.')[2]}={short(label)}" if "." in key else short(label)


def words(keys: Key, labels: Key) -> str:
    """The labels of a row or column, without a dash for what a run has not."""
    pairs = zip(keys, labels, strict=True)
    return " ".join(named(key, label) for key, label in pairs if label != "-") or "-"


def but_ratio(keys: Key, labels: Key) -> Key:
    """The labels of a row or column, without that of the ratio."""
    return tuple(text for key, text in zip(keys, labels, strict=True) if key != "sparsity")
