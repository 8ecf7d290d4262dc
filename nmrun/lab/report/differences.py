"""The rows of a table against its baseline, cell by cell."""

from __future__ import annotations

from dataclasses import replace

from nmrun.errors import ConfigError
from nmrun.lab.report.labels import Key
from nmrun.lab.report.statistics import Difference, grain, holm, paired
from nmrun.lab.report.tables import Table
from nmrun.registry import did_you_mean


def compare(table: Table, baseline: str, test: str = "t") -> Table:
    """Compare the rows of a table with a baseline, seed by seed.

    Rows of another data set are not compared.

    Args:
        table: as :func:`nmrun.lab.report.tables.build` makes it.
        baseline: a row by all its labels, or by that of the recipe alone. Then each row is compared
            with the one of that recipe that agrees with it in all that is not of the recipe.
        test: ``t`` or ``wilcoxon``.

    Returns:
        The same table with ``differences``.

    Raises:
        ConfigError: if there is no such row, or if no other row shares a seed with it.
    """
    every, rivals = pairs(table, baseline)
    found: dict[tuple[Key, Key], Difference] = {}
    across: set[str] = set()
    for (row, column), own in rivals.items():
        cell, other = table.cells[row, column], table.cells[own, column]
        if (gap := paired(cell, other, step(table, row, column), test)) is not None:
            found[row, column] = gap
            across |= _unlike(table, row, own)
    if not found:
        raise ConfigError(
            f"--baseline {baseline}: no other row has runs of the same seeds; the test pairs runs by their seed"
        )
    differences = holm(found, test)
    return replace(table, baseline=every, test=test, differences=differences, across=sorted(across))


def pairs(table: Table, baseline: str) -> tuple[list[Key], dict[tuple[Key, Key], Key]]:
    """Find which rows are the baseline, and with which of them each other cell is compared.

    Args:
        table: as :func:`nmrun.lab.report.tables.build` makes it.
        baseline: as of :func:`compare`.

    Returns:
        The rows of the baseline; and by row and column, the one that stands against the cell there.

    Raises:
        ConfigError: if there is no such row.
    """
    names = {" ".join(row): row for row in table.rows}
    recipe = table.row_keys.index("recipe") if "recipe" in table.row_keys else 0
    every = (
        [names[baseline]]
        if baseline in names
        else [row for row in table.rows if row[recipe] == baseline]
    )
    if not every:
        raise ConfigError(
            f"--baseline {baseline}: no such row{did_you_mean(baseline, names)} (there are {', '.join(names)})"
        )
    found: dict[tuple[Key, Key], Key] = {}
    for row, column in table.cells:
        own = every if baseline in names else [b for b in every if not _unlike(table, row, b)]
        if not own or row in every or (own[0], column) not in table.cells:
            continue
        if not any(key.partition(".")[0] == "dataset" for key in _unlike(table, row, own[0])):
            found[row, column] = own[0]
    return every, found


def _unlike(table: Table, row: Key, own: Key) -> set[str]:
    """The keys in which two rows differ, but for those of the recipe."""
    labels = zip(table.row_keys, row, own, strict=True)
    return {key for key, a, b in labels if a != b and key.partition(".")[0] != "recipe"}


def step(table: Table, row: Key, column: Key) -> float:
    """Find the smallest step of a cell's metric that its column shows.

    Args:
        table: the table.
        row, column: the cell's place.
    """
    metric = table.metric_of(row, column)
    return grain(
        value
        for (other, place), cell in table.cells.items()
        if place == column and table.metric_of(other, place) == metric
        for value in cell.values.values()
    )
