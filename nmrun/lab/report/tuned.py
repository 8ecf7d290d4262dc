"""What a caption says of the tuning that runs had before (``nmrun tune``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nmrun.lab.report import names

Run = Mapping[Any, Any]
Row = tuple[str, ...]


def notes(cells: Mapping[tuple[Row, Row], Sequence[Run]]) -> list[str]:
    """Say by how many trials each row was tuned, by which metric, and over which settings.

    Args:
        cells: the runs of each cell of a table, by row and column.

    Returns:
        By how many trials; then over which settings. None where no run was tuned.
    """
    over: dict[str, list[str]] = {}
    by: dict[str, list[str]] = {}
    for (row, _), runs in cells.items():
        for run in runs:
            tuned = isinstance(run.get("tuned.over"), str)
            _add(by, _how(run) if tuned else "none", row)
            _add(over, _in_words(run["tuned.over"]) if tuned else "", row)
    if set(by) <= {"none"}:
        return []
    spaces = {said: said.split("; ") if said else [] for said in over}
    common = [s for s in next(iter(spaces.values())) if all(s in own for own in spaces.values())]
    own = [
        f"{', '.join(over[who])} over {' and '.join(rest)}"
        for who, each in spaces.items()
        if (rest := [s for s in each if s not in common])
    ]
    said = [f"all over {', '.join(common)}"] * bool(common) + own
    return [f"each cell tuned before by {_by(by)}", *(["; ".join(said)] * bool(said))]


def _in_words(over: str) -> str:
    """Search spaces with words for their keys."""
    spaces = (each.partition(" ") for each in over.split("; "))
    return "; ".join(f"{names.setting(key)} {search}" for key, _, search in spaces)


def _how(run: Run) -> str:
    by = names.bare(run["tuned.by"])
    return f"{run['tuned.trials']} trials by {by}, the best two with three seeds"


def _add(found: dict[str, list[str]], said: str, row: Iterable[str]) -> None:
    name = " ".join(row)
    names = found.setdefault(said, [])
    if name not in names:
        names.append(name)


def _by(by: Mapping[str, list[str]]) -> str:
    if len(by) == 1:
        return next(iter(by))
    return ", ".join(f"{how} ({', '.join(names)})" for how, names in by.items())
