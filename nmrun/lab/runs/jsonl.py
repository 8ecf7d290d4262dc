"""Files of JSON objects, one a line, as a kill or a bad disk may have left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nmrun.lab.runs import documents


def read(
    path: Path, parsed: Callable[[bytes], Any] = documents.parsed
) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a file that are whole.

    Args:
        parsed: gives the value of a line, or raises ValueError.

    Returns:
        The objects, and the numbers, from 1, of the lines that hold none. Both are empty if there
        is no such file.

    Raises:
        OSError: for a file that is there and cannot be read.
    """
    try:
        lines = documents.read(path).split(b"\n")
    except FileNotFoundError:
        return [], []
    found, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            value = parsed(line) if line else None
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif line:
            damaged.append(number)
    return found, damaged


def newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """The whole objects of a file from its end on, each read when it is asked for; none where the
    file cannot be read.
    """
    try:
        lines = documents.read(path).split(b"\n")
    except OSError:
        return
    for line in reversed(lines):
        try:
            value = documents.parsed(line) if line else None
        except ValueError:  # half written
            continue
        if isinstance(value, dict):
            yield value
