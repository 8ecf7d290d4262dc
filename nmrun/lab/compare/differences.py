"""Each row of a table against a baseline, seed by seed: cell by cell, and over all cells of a data
set.

Over all cells the question is whether a recipe is better at a task. Perplexities and accuracies
have no unit in common. So a cell is measured in the standard deviation of a run over its seeds
there: the median over the rows that are not compared. With a unit from the compared rows, a spread
that is small by chance would make a difference look certain. Every cell counts alike.

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
from nmrun.lab.compare.notation import Key
from nmrun.lab.compare.statistics import Difference, difference, holm, moderated, paired
from nmrun.lab.compare.tables import Place, Table
from nmrun.registry import no_such


def against(table: Table, baseline: str) -> Table:
    """A table with the differences of its rows to a baseline, seed by seed, within each data set.

    ``baseline`` is a row by all its labels, or by that of the recipe alone. Then each row is
    compared with the one of that recipe that agrees with it in all that is not of the recipe.
    Raises ConfigError if there is no such row, or if no other row shares a seed with it.
    """
    every, rivals = pairs(table, baseline)
    by_metric: dict[str, dict[Place, Difference]] = {}
    for (row, column), rival in rivals.items():
        cell, other = table.cells[row, column], table.cells[rival, column]
        metric = table.metric_of(row, column)
        gap = paired(cell, other, table.step(row, column), table.higher_is_better(metric))
        if gap is not None:
            by_metric.setdefault(metric, {})[row, column] = gap
    if not by_metric:
        raise _no_pair(baseline)
    judged = holm({at: gap for gaps in by_metric.values() for at, gap in moderated(gaps).items()})
    differences = {place: judged[place] for place in rivals if place in judged}
    return replace(table, baseline=every, differences=differences)


def pairs(table: Table, baseline: str) -> tuple[list[Key], dict[Place, Key]]:
    """The rows of a baseline, and by place the one of them that a cell is compared with."""
    by_name = {" ".join(row): row for row in table.rows}
    exact = baseline in by_name
    recipe = table.row_keys.index("recipe") if "recipe" in table.row_keys else 0
    of_recipe = [row for row in table.rows if row[recipe] == baseline]
    every = [by_name[baseline]] if exact else of_recipe
    if not every:
        listing = no_such("row", baseline, by_name, "nmrun table")
        raise ConfigError(f"--baseline {baseline}: {listing}")
    rivals: dict[Place, Key] = {}
    for row, column in table.cells:
        like = every if exact else [other for other in every if not _unlike(table, row, other)]
        if not like or row in every or (like[0], column) not in table.cells:
            continue
        unlike = {key.partition(".")[0] for key in _unlike(table, row, like[0])}
        if not unlike & {"dataset", "metric"}:
            rivals[row, column] = like[0]
    return every, rivals


def _unlike(table: Table, row: Key, other: Key) -> set[str]:
    """The keys, without the recipe's, in which two rows differ."""
    labels = zip(table.row_keys, row, other, strict=True)
    return {key for key, a, b in labels if a != b and key.partition(".")[0] != "recipe"}


def _no_pair(baseline: str) -> ConfigError:
    return ConfigError(
        f"--baseline {baseline}: no seed has a value there and in another row; the test pairs runs by their seed"
    )


# --- over all cells -------------------------------------------------------------------------------


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


def over_all_cells(tables: Sequence[Table], baseline: str) -> list[Overall]:
    """Compare the rows of some tables, one for each data set and model, with a baseline.

    Spreads are moderated, and p-values corrected for their number, over all rows and data sets.
    Raises ConfigError if a table has no such row, where no other row shares a seed with it, and where
    no cell has two seeds.
    """
    if all(cell.sd is None for table in tables for cell in table.cells.values()):
        raise ConfigError(
            "--overall: its unit is the standard deviation of a run, and no cell has two seeds"
        )
    gathered: dict[Key, dict[str, list[_Cell]]] = {}
    for table in tables:
        for (row, column), rival in pairs(table, baseline)[1].items():
            if cell := _cell(table, row, column, rival):
                labels = dict(zip(table.row_keys + table.column_keys, row + column, strict=True))
                data = labels.get("dataset", table.shared.get("dataset", ""))
                gathered.setdefault(row, {}).setdefault(data, []).append(cell)
    if not gathered:
        raise _no_pair(baseline)
    parts = {
        (row, data): _part(gathered[row][data])
        for row in dict.fromkeys(row for table in tables for row in table.rows if row in gathered)
        for data in gathered[row]
    }
    judged = holm(moderated({place: part.gap for place, part in parts.items()}))
    rows: dict[Key, Overall] = {}
    for (row, data), part in parts.items():
        if row not in rows:
            cells = [cell for table in tables for cell in table.cells_of(row)]
            failed = sum(cell.without.get("failed", 0) for cell in cells)
            rows[row] = Overall(row, {}, failed, failed + sum(cell.n for cell in cells))
        rows[row].parts[data] = replace(part, gap=judged[row, data])
    return list(rows.values())


def better(means: Sequence[float]) -> int:
    """In how many cells a row is better than the baseline, by the mean difference of each."""
    return sum(value > 0 for value in means)


@dataclass(frozen=True)
class _Cell:
    gaps: dict[object, float]  # in units of the cell, by seed
    failed: set[object]  # seeds, in either of the compared cells
    least: float  # one step of the metric in that unit
    apart: bool  # the unit is of other runs


def _cell(table: Table, row: Key, column: Key, rival: Key) -> _Cell | None:
    """A cell against the baseline's; None where they share no seed, or the column has no unit."""
    higher = table.higher_is_better(table.metric_of(row, column))
    cell, other = table.cells[row, column], table.cells[rival, column]
    ours, theirs = cell.judged(higher), other.judged(higher)
    common = [seed for seed in ours if seed in theirs]
    cells = table.column_cells(row, column)
    deviations = {other: cell.sd for other, cell in cells.items() if cell.sd is not None}
    if not common or not deviations:
        return None
    others = [place for place in deviations if place not in (row, rival)]
    counts = tuple(sorted(cells[place].n for place in others))
    apart = bool(others) and counts != (2,)  # the inverse of one deviation of two has no mean
    known = [deviations[place] for place in others] or [*deviations.values()]
    step = table.step(row, column)
    unit = max(statistics.median(known) * (inverse(counts) if apart else 1.0), step)
    failed = {*cell.failed, *other.failed}
    if not unit:  # all runs of the column are equal
        return _Cell(dict.fromkeys(common, 0.0), failed, 0.0, True)
    sign = 1.0 if higher else -1.0
    gaps = {seed: sign * (ours[seed] - theirs[seed]) / unit for seed in common}
    return _Cell(gaps, failed, step / unit, apart)


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


def _part(cells: Sequence[_Cell]) -> DataSetPart:
    means = [statistics.fmean(cell.gaps.values()) for cell in cells]
    common = [seed for seed in cells[0].gaps if all(seed in cell.gaps for cell in cells)]
    if not common or not all(cell.apart for cell in cells):
        return DataSetPart(means, Difference(statistics.fmean(means), len(common)))
    gaps = {seed: statistics.fmean(cell.gaps[seed] for cell in cells) for seed in common}
    failed = {seed for cell in cells for seed in cell.failed}
    least = min(cell.least for cell in cells) / len(cells)
    return DataSetPart(means, difference(gaps, failed, least, max(map(abs, gaps.values()))))
