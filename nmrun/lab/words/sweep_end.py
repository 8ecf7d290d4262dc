"""What a sweep says when it has ended: the plans of its jobs, and the command for the
table."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from nmrun.lab.words import sweep, zipped

SAID = ("recipe", "sparsity", "dry")  # what a plan has, or all plans have
OWN_AXES = ("seed", "seeds", "sparsity", "output_dir")  # what a table averages over or has anyway


def planned(folder: Path) -> list[str]:
    """List the jobs that were only planned (``dry=true``), one a line: recipe, ratio, what is swept
    beside them, steps and FLOPs.

    Args:
        folder: that of the sweep's record.
    """
    done = [line for line in sweep.read(folder).done if line.get("plan")]
    swept = [key for key in _varied([line["overrides"] for line in done]) if key not in SAID]
    rows = []
    for line in done:
        words = {zipped.key(word): word.partition("=")[2] for word in line["overrides"]}
        recipe, ratio, *rest = line["plan"].items()
        rows.append(dict([recipe, ratio, *((key, words.get(key, "")) for key in swept), *rest]))
    cells = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def lines(folder: Path) -> list[str]:
    """The lines below the summary; none where no job has a result.

    Args:
        folder: that of the sweep's record.
    """
    record = sweep.read(folder)
    good = [line for line in record.done if line["status"] in ("finished", "skipped")]
    places = [line["folder"] for line in good if line.get("folder")]
    if not places:
        return []
    varied = _varied([line["overrides"] for line in record.done])
    # <dataset>/<model>/<recipe>/<ratio>/<run>
    above = {str(Path(place).parents[3]) for place in places}
    path = above.pop() if len(above) == 1 else os.path.commonpath(places)
    rows = [key for key in varied if key not in OWN_AXES]
    words = ["nmrun", "table", path]
    if rows and rows != ["recipe"]:
        words += ["--rows", ",".join(dict.fromkeys(["recipe", *rows]))]
    return [f"  {shlex.join(words)}"]


def _varied(jobs: Sequence[Sequence[str]]) -> dict[str, None]:
    """The keys in which jobs differ, in their order."""
    values: dict[str, set[str]] = {}
    for words in jobs:
        for word in words:
            values.setdefault(zipped.key(word), set()).add(word.partition("=")[2])
    return dict.fromkeys(key for key, found in values.items() if len(found) > 1)
