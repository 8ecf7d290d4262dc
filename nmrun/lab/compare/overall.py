"""One difference to the baseline over all cells of some tables: is a recipe better on the whole?

Perplexities and accuracies have no unit in common. So a cell is measured in the standard deviation
of a run over its seeds there: the median over the rows that are not compared. With a unit from the
compared rows, a spread that is small by chance would make a difference look certain. Every cell
counts alike.

Runs of one data set and one seed see the same batches, at whatever ratio, so they are one
observation. The test is of the means over such runs, whose spread each data set has for itself. It
is the t-test of Welch 1947 for a weighted sum of means, with Satterthwaite's degrees of freedom.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nmrun.errors import ConfigError
from nmrun.lab.compare.notation import Key
from nmrun.lab.compare.statistics import (
    FEWEST,
    LEVEL,
    Tested,
    corrected,
    detectable_mean,
    t_quantile,
    t_two_sided,
)
from nmrun.lab.compare.tables import Table, pairs, step


@dataclass(frozen=True)
class DataSetPart:
    """A row's cells of one data set.

    ``means`` has the mean difference of each cell, positive where the row is better. ``gaps`` has
    the mean over all cells, one value for each seed that every cell has. ``least`` is the smallest
    spread over seeds that the metrics' resolution can tell from 0. ``apart``: whether the unit, a
    standard deviation, is of other runs than the differences.
    """

    means: list[float]
    gaps: list[float]
    least: float
    apart: bool = True


@dataclass(frozen=True)
class Mean(Tested):
    """A mean difference in standard deviations of a run, positive where the row is better.

    ``low`` to ``high`` is its 95 % interval. It is None where a data set has fewer than two seeds
    that all of its cells have. So it is for several cells whose units are of the compared runs.
    ``p`` is None for fewer than three seeds as well. ``error`` is the standard error, with
    ``freedom`` degrees of freedom. ``least`` is the smallest true difference that the test would
    have found with a probability of 0.8.
    """

    value: float
    error: float | None = None
    freedom: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    least: float | None = None


@dataclass(frozen=True)
class Overall:
    """A row against the baseline: its ``parts`` by data set, and the mean over all of its cells.
    ``failed`` of its ``runs`` there are in no difference.
    """

    row: Key
    parts: dict[str, DataSetPart]
    mean: Mean
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


def against(tables: Sequence[Table], baseline: str) -> list[Overall]:
    """Compare the rows of some tables, one for each data set and model, with a baseline over all
    cells.

    p-values are corrected for their number by Holm's method, and ``least`` is at the level that it
    begins with. Raises ConfigError if a table has no such row, and where no other row shares a seed
    with it.
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
        rows.append(Overall(row, parts, mean(list(parts.values())), failed, runs))
    return _corrected(rows)


def better(means: Sequence[float]) -> int:
    """In how many cells a row is better than the baseline, by the mean difference of each."""
    return sum(value > 0 for value in means)


def mean(parts: Sequence[DataSetPart]) -> Mean:
    """The mean over data sets, weighed by their cells, with its interval and p-value."""
    every = [value for part in parts for value in part.means]
    if any(len(part.gaps) < 2 for part in parts) or not weighed(parts):
        return Mean(statistics.fmean(every))
    weights = [len(part.means) / len(every) for part in parts]
    value = sum(w * statistics.fmean(p.gaps) for w, p in zip(weights, parts, strict=True))
    squares = [
        (w * max(statistics.stdev(p.gaps), p.least)) ** 2 / len(p.gaps)
        for w, p in zip(weights, parts, strict=True)
    ]
    if not sum(squares):  # all values are equal
        return Mean(value)
    of_squares = sum(v**2 / (len(p.gaps) - 1) for v, p in zip(squares, parts, strict=True))
    error, freedom = math.sqrt(sum(squares)), sum(squares) ** 2 / of_squares
    half = error * t_quantile((1 + LEVEL) / 2, freedom)
    tested = all(len(part.gaps) >= FEWEST for part in parts)
    p = float(t_two_sided(np.array(abs(value) / error), freedom)) if tested else None
    return Mean(value, error, freedom, value - half, value + half, p)


def weighed(parts: Sequence[DataSetPart]) -> bool:
    """Whether the cells' units are independent of their differences. A single cell needs no unit."""
    return all(part.apart for part in parts) or sum(len(part.means) for part in parts) == 1


@dataclass(frozen=True)
class _Cell:
    gaps: dict[object, float]  # in units of the cell, by seed
    least: float  # one step of the metric in that unit
    apart: bool = True  # the unit is of other runs


def _cell(table: Table, row: Key, column: Key, rival: Key) -> _Cell | None:
    """A cell against the baseline's; None where they share no seed."""
    ours, theirs = table.cells[row, column].values, table.cells[rival, column].values
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
    sign = 1.0 if table.higher_is_better(table.metric_of(row, column)) else -1.0
    if not unit:  # all runs of the column are equal
        return _Cell(dict.fromkeys(common, 0.0), 0.0)
    gaps = {seed: sign * (ours[seed] - theirs[seed]) / unit for seed in common}
    return _Cell(gaps, least / unit, apart)


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
    common = [seed for seed in cells[0].gaps if all(seed in cell.gaps for cell in cells)]
    gaps = [statistics.fmean(cell.gaps[seed] for cell in cells) for seed in common]
    least = min(cell.least for cell in cells) / len(cells)
    means = [statistics.fmean(cell.gaps.values()) for cell in cells]
    return DataSetPart(means, gaps, least, all(cell.apart for cell in cells))


def _corrected(rows: Sequence[Overall]) -> list[Overall]:
    p_values, level = corrected([row.mean.p for row in rows])
    return [
        replace(row, mean=_judged(row.mean, p, level))
        for row, p in zip(rows, p_values, strict=True)
    ]


def _judged(average: Mean, p: float | None, level: float) -> Mean:
    if p is None:
        return average
    assert average.error is not None  # there is a p-value
    assert average.freedom is not None
    least = average.error * detectable_mean(average.freedom, level)
    return replace(average, p=p, least=least)
