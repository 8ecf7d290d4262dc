"""The differences to a baseline over all cells of a data set: is a recipe better at this task?

Perplexities and accuracies have no unit in common. So a cell is measured in the standard deviation
of a run over its seeds there: the median over the rows that are not compared. With a unit from the
compared rows, a spread that is small by chance would make a difference look certain. Every cell
counts alike.

Runs of one data set and one seed see the same batches, at whatever ratio, so they are one
observation. The test is of the means over such runs. Data sets are not observations of tasks at
large, so nothing is tested over all of them: the mean over all but one says how much hangs on each.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nmrun.errors import ConfigError
from nmrun.lab.compare.differences import pairs
from nmrun.lab.compare.notation import Key
from nmrun.lab.compare.statistics import Difference, difference, holm, moderated
from nmrun.lab.compare.tables import Table, step


@dataclass(frozen=True)
class DataSetPart:
    """A row's cells of one data set, in standard deviations of a run, positive where it is better.

    ``means`` has the mean difference of each cell. ``gap`` is of the mean over all cells, over the
    seeds that every cell has. Nothing is known of its spread where units are of the compared runs.
    """

    means: list[float]
    gap: Difference


@dataclass(frozen=True)
class Overall:
    """A row against the baseline, by data set. ``failed`` of its ``runs`` failed."""

    row: Key
    parts: dict[str, DataSetPart]
    failed: int = 0
    runs: int = 0

    @property
    def means(self) -> list[float]:
        """The mean difference of each cell."""
        return [value for part in self.parts.values() for value in part.means]

    @property
    def median(self) -> float:
        """The median of the cells' mean differences, which no single cell can move."""
        return statistics.median(self.means)

    @property
    def mean(self) -> float:
        """The mean over all cells."""
        return _mean(self.parts.values())

    @property
    def all_but(self) -> dict[str, float]:
        """The mean over the cells of all other data sets, by the one that is left out; empty for a
        single data set."""
        return {
            left_out: _mean(part for data, part in self.parts.items() if data != left_out)
            for left_out in self.parts
            if len(self.parts) > 1
        }


def _mean(parts: Iterable[DataSetPart]) -> float:
    sums = [(len(part.means), len(part.means) * part.gap.mean) for part in parts]
    return math.fsum(total for _, total in sums) / sum(cells for cells, _ in sums)


def against(tables: Sequence[Table], baseline: str) -> list[Overall]:
    """Compare the rows of some tables, one for each data set and model, with a baseline.

    Spreads are moderated, and p-values corrected for their number, over all rows and data sets.
    Raises ConfigError if a table has no such row, and where no other row shares a seed with it.
    """
    gathered: dict[Key, dict[str, list[_Cell]]] = {}
    for table in tables:
        for (row, column), rival in pairs(table, baseline)[1].items():
            if cell := _cell(table, row, column, rival):
                data = _data_set(table, row, column)
                gathered.setdefault(row, {}).setdefault(data, []).append(cell)
    if not gathered:
        raise ConfigError(f"--baseline {baseline}: no other row has runs of the same seeds")
    rows = []
    for row in dict.fromkeys(row for table in tables for row in table.rows if row in gathered):
        parts = {data: _part(cells) for data, cells in gathered[row].items()}
        cells = [cell for table in tables for cell in table.cells_of(row)]
        failed = sum(cell.without.get("failed", 0) for cell in cells)
        runs = failed + sum(cell.n for cell in cells)
        rows.append(Overall(row, parts, failed, runs))
    gaps = {(each.row, data): part.gap for each in rows for data, part in each.parts.items()}
    judged = holm(moderated(gaps))
    return [
        replace(
            each,
            parts={data: replace(p, gap=judged[each.row, data]) for data, p in each.parts.items()},
        )
        for each in rows
    ]


def better(means: Sequence[float]) -> int:
    """In how many cells a row is better than the baseline, by the mean difference of each."""
    return sum(value > 0 for value in means)


@dataclass(frozen=True)
class _Cell:
    gaps: dict[object, float]  # in units of the cell, by seed
    failed: set[object]  # seeds, in either of the compared cells
    least: float  # one step of the metric in that unit
    apart: bool = True  # the unit is of other runs


def _cell(table: Table, row: Key, column: Key, rival: Key) -> _Cell | None:
    """A cell against the baseline's; None where they share no seed."""
    higher = table.higher_is_better(table.metric_of(row, column))
    cell, other = table.cells[row, column], table.cells[rival, column]
    ours, theirs = cell.judged(higher), other.judged(higher)
    failed = {*cell.failed, *other.failed}
    common = [seed for seed in ours if seed in theirs]
    if not common:
        return None
    cells = table.column_cells(row, column)
    deviations = {other: cell.sd for other, cell in cells.items() if cell.sd is not None}
    others = [place for place in deviations if place not in (row, rival)]
    counts = tuple(sorted(cells[place].n for place in others))
    apart = bool(others) and counts != (2,)  # the inverse of one deviation of two has no mean
    least, unit = (
        step(table, row, column),
        statistics.median(
            [deviations[place] for place in others] or list(deviations.values()) or [0.0]
        ),
    )
    unit = max(unit * inverse(counts) if apart else unit, least)
    sign = 1.0 if higher else -1.0
    if not unit:  # all runs of the column are equal
        return _Cell(dict.fromkeys(common, 0.0), failed, 0.0)
    gaps = {seed: sign * (ours[seed] - theirs[seed]) / unit for seed in common}
    return _Cell(gaps, failed, least / unit, apart)


@functools.lru_cache
def inverse(counts: tuple[int, ...]) -> float:
    """The factor by which a difference is too large, on average, when it is divided by the median
    of sample deviations. The deviations are of normal values of one spread, with as many in each
    row as ``counts`` says. In closed form for one row, by simulation to 0.1 % for several."""
    if len(counts) == 1:
        half = (counts[0] - 1) / 2
        return math.sqrt(half) * math.exp(math.lgamma(half - 0.5) - math.lgamma(half))
    rng, draws = np.random.default_rng(0), 100_000
    squares = [rng.chisquare(count - 1, draws) / (count - 1) for count in counts]
    return float((1 / np.median(np.sqrt(squares), axis=0)).mean())


def _data_set(table: Table, row: Key, column: Key) -> str:
    labels = dict(zip(table.row_keys + table.column_keys, row + column, strict=True))
    return labels.get("dataset", table.shared.get("dataset", ""))


def _part(cells: Sequence[_Cell]) -> DataSetPart:
    means = [statistics.fmean(cell.gaps.values()) for cell in cells]
    common = [seed for seed in cells[0].gaps if all(seed in cell.gaps for cell in cells)]
    if not common or not all(cell.apart for cell in cells):
        return DataSetPart(means, Difference(statistics.fmean(means), len(common)))
    gaps = {seed: statistics.fmean(cell.gaps[seed] for cell in cells) for seed in common}
    failed = {seed for cell in cells for seed in cell.failed}
    least = min(cell.least for cell in cells) / len(cells)
    return DataSetPart(means, difference(gaps, failed, least, max(map(abs, gaps.values()))))
