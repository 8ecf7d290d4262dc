"""Each row of a table against a baseline, seed by seed."""

from __future__ import annotations

from dataclasses import replace

from nmrun.errors import ConfigError
from nmrun.lab.compare.notation import Key
from nmrun.lab.compare.statistics import Difference, holm, moderated, paired
from nmrun.lab.compare.tables import Place, Table, named_rows, step


def against(table: Table, baseline: str) -> Table:
    """A table with the differences of its rows to a baseline, seed by seed, within each data set.

    ``baseline`` is a row by all its labels, or by that of the recipe alone. Then each row is
    compared with the one of that recipe that agrees with it in all that is not of the recipe.
    Raises ConfigError if there is no such row, or if no other row shares a seed with it.
    """
    every, rivals = pairs(table, baseline)
    differences: dict[Place, Difference] = {}
    across: set[str] = set()
    unpaired: list[Place] = []
    for (row, column), rival in rivals.items():
        cell, other = table.cells[row, column], table.cells[rival, column]
        higher = table.higher_is_better(table.metric_of(row, column))
        if (gap := paired(cell, other, step(table, row, column), higher)) is not None:
            differences[row, column] = gap
            across |= _unlike(table, row, rival)
        elif cell.n and other.n:
            unpaired.append((row, column))
    if not differences:
        raise ConfigError(
            f"--baseline {baseline}: no other row has runs of the same seeds; the test pairs runs by their seed"
        )
    by_metric: dict[str, dict[Place, Difference]] = {}
    for place, gap in differences.items():
        by_metric.setdefault(table.metric_of(*place), {})[place] = gap
    judged = {place: gap for some in by_metric.values() for place, gap in moderated(some).items()}
    return replace(
        table,
        baseline=every,
        differences=holm({place: judged[place] for place in differences}),
        across=sorted(across),
        unpaired=unpaired,
    )


def pairs(table: Table, baseline: str) -> tuple[list[Key], dict[Place, Key]]:
    """The rows of a baseline, and by place the one of them that a cell is compared with."""
    every = named_rows(table.rows, table.row_keys, baseline)
    exact = " ".join(every[0]) == baseline
    rivals: dict[Place, Key] = {}
    for row, column in table.cells:
        like = every if exact else [other for other in every if not _unlike(table, row, other)]
        if not like or row in every or (like[0], column) not in table.cells:
            continue
        if not any(key.partition(".")[0] == "dataset" for key in _unlike(table, row, like[0])):
            rivals[row, column] = like[0]
    return every, rivals


def _unlike(table: Table, row: Key, other: Key) -> set[str]:
    """The keys, without the recipe's, in which two rows differ."""
    labels = zip(table.row_keys, row, other, strict=True)
    return {key for key, a, b in labels if a != b and key.partition(".")[0] != "recipe"}
