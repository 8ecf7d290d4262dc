"""Runs folded into cells, one row a recipe, one column a ratio."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from nmrun.errors import ConfigError
from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import (
    LOWER_IS_BETTER,
    Key,
    but_ratio,
    deviates,
    label,
    labels_of,
    places,
    scale,
)
from nmrun.lab.compare.statistics import FEWEST, Cell, Difference, grain, summarise
from nmrun.lab.config.identity import DECIDING, IRRELEVANT, SETTINGS, without_effect
from nmrun.lab.output import quantity
from nmrun.oneshot import METHODS

Run = Mapping[Any, Any]  # a row of ``collect``
Place = tuple[Key, Key]  # row and column
# column, metric, data set and model: what cells have in common of which one is a unit for another
Kind = tuple[Key, str, Key]

SAMPLES = "recipe.samples"  # of a calibration
TRAINING = ("optimizer", "schedule", "trainer")
FAR = 10.0  # a failed seed is worse than its cell's median by more than so many deviations of a run
APART = ("dataset", "model", "sparsity", "metric")  # recipes that differ in one are no rivals
LARGEST = 1e100  # a metric beyond has diverged, and squares of some would be infinite
SCORES = ("test", "eval", "best")  # the metrics that can show that a seed failed


@dataclass(frozen=True)
class Table:
    """Cells by (row, column).

    A row without a ratio has one cell, in a column of its own (``dense``): ``stands`` says in which
    columns it is printed. ``best`` has the best cells of each comparison, see ``compared``.
    ``shared`` has the settings that all runs have in common, and ``differing`` those that differ
    between cells and that no row or column names. ``failed`` counts runs that have a value and are
    taken for failed, see ``_set_apart``.

    ``differences`` are between a cell and that of its ``baseline`` row in the same column. Their
    spreads are moderated within a metric, and p-values corrected for the number of all.
    ``paper`` has published figures as printed, by row and column.
    """

    metric: str
    row_keys: Key
    column_keys: Key
    rows: list[Key]
    columns: list[Key]
    cells: dict[Place, Cell]
    stands: dict[Place, list[Key]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    best: frozenset[Place] = frozenset()
    failed: int = 0
    baseline: list[Key] = field(default_factory=list)
    differences: dict[Place, Difference] = field(default_factory=dict)
    paper: dict[str, dict[str, str]] = field(default_factory=dict)
    paper_source: str = ""
    runs: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False, compare=False)

    @functools.cached_property
    def records(self) -> Sequence[Run]:
        """The runs, one by one."""
        return self.runs.to_dict("records")

    @property
    def compared(self) -> tuple[str, list[str]]:
        """Whether ``best`` compares the cells of a ``column``, or of a ``row`` where recipes stand
        side by side. And the keys of that axis in which they agree.
        """
        recipes_are_columns = "recipe" in self.column_keys and "recipe" not in self.row_keys
        keys = self.column_keys if recipes_are_columns else self.row_keys
        apart = APART if "recipe" in keys else ("metric",)
        return "row" if recipes_are_columns else "column", [key for key in keys if key in apart]

    @property
    def references(self) -> set[Key]:
        """The rows without a ratio."""
        return {row for row, _ in self.stands}

    def columns_of(self, row: Key) -> list[tuple[Key, Key]]:
        """The columns in which a row has runs, each with a column that shows the cell."""
        if row not in self.references:
            return [(column, column) for column in self.columns]
        return [(column, columns[0]) for (r, column), columns in self.stands.items() if r == row]

    def cells_of(self, row: Key) -> list[Cell]:
        """The cells of a row; one that stands in several columns is one."""
        shown = ((row, column) for _, column in self.columns_of(row))
        return [self.cells[place] for place in shown if place in self.cells]

    def metric_of(self, row: Key, column: Key) -> str:
        """The metric of a cell: where rows or columns are metrics, its own."""
        labels = dict(zip(self.row_keys + self.column_keys, row + column, strict=True))
        return labels.get("metric", self.metric)

    def higher_is_better(self, metric: str) -> bool:
        """Whether higher values of a metric, such as ``test/accuracy``, are better. For the task's
        own metric the runs say so."""
        name = metric.rpartition("/")[2]
        known = name not in LOWER_IS_BETTER and not metric.startswith("flops/")
        return self._directions.get(name, known)

    @functools.cached_property
    def _directions(self) -> dict[str, bool]:
        if "higher_is_better" not in self.runs:  # of a CSV file
            return {}
        told = self.runs[["metric", "higher_is_better"]].dropna()
        return dict(zip(told["metric"], told["higher_is_better"], strict=True))

    def column_cells(self, row: Key, column: Key) -> dict[Key, Cell]:
        """The cells by row of a column that have the metric, data set and model of the cell in
        ``row``, which is among them."""
        return self._by_kind[self._kind(row, column)]

    def _kind(self, row: Key, column: Key) -> Kind:
        pairs = zip(self.row_keys, row, strict=True)
        apart = tuple(t for key, t in pairs if key.partition(".")[0] == "dataset" or key == "model")
        return column, self.metric_of(row, column), apart

    @functools.cached_property
    def _by_kind(self) -> dict[Kind, dict[Key, Cell]]:
        cells: dict[Kind, dict[Key, Cell]] = {}
        for (row, column), cell in self.cells.items():
            cells.setdefault(self._kind(row, column), {})[row] = cell
        return cells

    def digits(self, row: Key, column: Key) -> int | None:
        """Digits after the point of a cell's mean and deviation: one number in a column, that of most
        of its cells. None, and those of a value without a spread, where the cell has none."""
        cell = self.cells[row, column]
        if cell.mean is None or not deviates(cell.mean, cell.sd):
            return None
        return self._digits[self._kind(row, column)]

    @functools.cached_property
    def _digits(self) -> dict[Kind, int]:
        digits: dict[Kind, Counter[int]] = {}
        for kind, cells in self._by_kind.items():
            digits[kind] = Counter(
                places(cell.mean, kind[1], cell.sd)
                for cell in cells.values()
                if cell.mean is not None and deviates(cell.mean, cell.sd)
            )
        return {at: max(n, key=lambda d: (n[d], d)) for at, n in digits.items() if n}

    def step(self, row: Key, column: Key) -> float:
        """The smallest step of a cell's metric that its column shows; FLOPs are counted, and have
        none."""
        return self._steps[self._kind(row, column)]

    @functools.cached_property
    def _steps(self) -> dict[Kind, float]:
        return {
            kind: 0.0
            if kind[1].startswith("flops/")
            else grain(value for cell in cells.values() for value in cell.values.values())
            for kind, cells in self._by_kind.items()
        }


# What stands beside the cells of a row, by the name of its column: a number or a text. All formats
# have it, but not the table over all cells, which is of several tables.
ROW_COLUMNS: dict[str, Callable[[Table, Key], Any]] = {}


def build(
    runs: pd.DataFrame, metric: str, row_keys: Sequence[str], column_keys: Sequence[str]
) -> Table:
    """Fold runs of one data set and model into a table. Columns go from dense to sparse, recipes in
    nmrun's order, metrics as in ``metric``, other labels by size or alphabet.

    ``metric`` names several with commas between where a key is ``metric``. Raises ConfigError where
    a cell would average over runs that differ in more than their seed, or would count a seed twice.
    """
    rows, columns = tuple(row_keys), tuple(column_keys)
    metrics = metric.split(",") if "metric" in (*rows, *columns) else [metric]
    every = ({**run, "metric": each} for run in runs.to_dict("records") for each in metrics)
    members = by_place(every, rows, columns)
    _check_alike(members, rows)
    cells = {place: _cell(group) for place, group in members.items()}
    stands = _stands(members, columns)
    for (row, column), shown_in in stands.items():
        dense = cells.pop((row, column))
        cells |= {(row, other): dense for other in shown_in}
    shared, differing = _settings([run for group in members.values() for run in group])
    named = {"recipe", "sparsity", *rows, *columns}
    table = Table(
        metric,
        rows,
        columns,
        _in_order((row for row, _ in members), rows, metrics),
        _in_order((column for _, column in cells), columns, metrics),
        cells,
        stands,
        shared,
        [key for key in differing if not {key, key.partition(".")[0]} & named],
        runs=runs,
    )
    table = _set_apart(table)
    return replace(table, best=frozenset(_best(table)))


def by_place(
    runs: Iterable[Run], row_keys: Sequence[str], column_keys: Sequence[str]
) -> dict[Place, list[Run]]:
    """Runs by their labels in these rows and columns."""
    places: dict[Place, list[Run]] = {}
    for run in runs:
        row, column = (tuple(label(run[k]) for k in keys) for keys in (row_keys, column_keys))
        places.setdefault((row, column), []).append(run)
    return places


def _settings(runs: Sequence[Run]) -> tuple[dict[str, str], list[str]]:
    """The settings that all runs have in common, and the keys of those that change results and
    differ."""
    pruned, trained = (
        [run for run in runs if (run["recipe"] in METHODS) == which] for which in (True, False)
    )

    def labels(key: str) -> set[str]:
        # what was pruned without training has no learning rate, whatever its config says
        of_training = key.partition(".")[0] in TRAINING
        having = trained if of_training else pruned if key == SAMPLES else runs
        return labels_of(run.get(key, math.nan) for run in having)

    keys = sorted({key for run in runs for key in run} - {"seed"})
    shared = {key: values.pop() for key in keys if len(values := labels(key)) == 1}
    # a run of another option has no such key
    return shared, [key for key in settings_apart(runs) if len(labels(key) - {"-"}) > 1]


def _in_order(every: Iterable[Key], keys: Key, metrics: Sequence[str]) -> list[Key]:
    def place(labels: Key) -> list[tuple[Any, ...]]:
        return [
            (0, metrics.index(text), 0, "") if key == "metric" else notation.order(text)
            for key, text in zip(keys, labels, strict=True)
        ]

    return sorted(set(every), key=place)


def _set_apart(table: Table) -> Table:
    """Drop the values of seeds that failed. Such a seed is worse than the median of its cell by
    more than a tenth of it and by more than ``FAR`` deviations of a run.

    That is the median deviation of the column's other rows, at least a step of the metric. Two such
    rows and three seeds are needed to tell.
    """
    failed: dict[int, set[object]] = {}  # seeds by cell: a dense one stands in several columns
    for (row, column), cell in table.cells.items():
        metric = table.metric_of(row, column)
        if cell.n < FEWEST or metric.partition("/")[0] not in SCORES:
            continue
        middle = statistics.median(cell.values.values())
        sign = 1 if table.higher_is_better(metric) else -1
        worse = {seed: sign * (middle - value) for seed, value in cell.values.items()}
        if max(worse.values()) <= abs(middle) / 10:
            continue
        rest = [each for name, each in table.column_cells(row, column).items() if name != row]
        deviations = [each.sd for each in rest if each.sd is not None]
        if len(deviations) > 1:
            unit = max(statistics.median(deviations), table.step(row, column))
            most = max(FAR * unit, abs(middle) / 10)
            failed.setdefault(id(cell), set()).update(s for s, gap in worse.items() if gap > most)

    def without(cell: Cell) -> Cell:
        if not (seeds := failed.get(id(cell))):
            return cell
        values = {seed: value for seed, value in cell.values.items() if seed not in seeds}
        reasons = [*Counter(cell.without).elements(), *["failed"] * len(seeds)]
        return summarise(values, reasons, (*cell.failed, *seeds))

    kept = {id(cell): without(cell) for cell in table.cells.values()}
    cells = {place: kept[id(cell)] for place, cell in table.cells.items()}
    return replace(table, cells=cells, failed=sum(map(len, failed.values())))


def _stands(places: Collection[Place], keys: Key) -> dict[Place, list[Key]]:
    """The columns of rows without a ratio, where other rows have one: see ``Table``."""
    if "sparsity" not in keys:
        return {}
    ratio = keys.index("sparsity")
    sparse = {row for row, column in places if column[ratio] != "dense"}
    columns = sorted({column for row, column in places if row in sparse})
    return {
        (row, column): [c for c in columns if but_ratio(keys, c) == but_ratio(keys, column)]
        or [column]
        for row, column in places
        if sparse and row not in sparse
    }


def _cell(group: Sequence[Run]) -> Cell:
    values: dict[object, float] = {}
    without = []
    failed = []
    for run in group:
        value = run.get(run["metric"], math.nan)
        if run["status"] != "finished":
            why = run["status"]
        elif value is None or abs(value) > LARGEST:  # null: it was not finite
            why = "failed"
        elif value != value:
            why = "without a value"
        else:
            values[run["seed"]] = float(value)
            continue
        without.append(why)
        if why == "failed" and run["metric"].partition("/")[0] in SCORES:
            failed.append(run["seed"])
    return summarise(values, without, failed)


def _check_alike(members: Mapping[Place, Sequence[Run]], rows: Key) -> None:
    names = {place: f"{' '.join(place[0])} at {' '.join(place[1])}" for place in members}
    apart = {name: keys for at, name in names.items() if (keys := settings_apart(members[at]))}
    if apart:
        differing = list(dict.fromkeys(key for keys in apart.values() for key in keys))
        first, *more = apart
        others = f" and {quantity(len(more), 'more cell')}" if more else ""
        raise ConfigError(
            f"{first}{others} would average over runs that differ in {', '.join(differing)}; "
            f"tell them apart with --rows {','.join([*rows, *differing])}, or choose with --filter"
        )
    for place, runs in members.items():
        seed, count = Counter(run["seed"] for run in runs).most_common(1)[0]
        if count > 1:
            folders = ", ".join(str(run["folder"]) for run in runs if run["seed"] == seed)
            raise ConfigError(
                f"{names[place]} would count seed {seed} {count} times: {folders}; name the folders of one set of runs only"
            )


def settings_apart(runs: Sequence[Run]) -> list[str]:
    """The settings, without the seed, that differ between runs and change the result of any. Where it
    is known, ``precision``, which ``trainer.precision=auto`` was on their machines, counts and not
    the setting."""
    trainers = [  # a run of a version without the key has NaN
        {key: value for key in DECIDING if (value := run.get(f"trainer.{key}")) == value}
        for run in runs
    ]
    irrelevant = {**IRRELEVANT, "trainer": set.intersection(*map(without_effect, trainers))}
    keys = [
        key
        for key in dict.fromkeys(k for run in runs for k in run)
        for group, _, name in [str(key).partition(".")]
        if group in SETTINGS and group != "seed" and name not in irrelevant.get(group, ())
    ]
    apart = [key for key in keys if len(labels_of(run[key] for run in runs)) > 1]
    known = labels_of(run.get("precision", math.nan) for run in runs)
    if "-" not in known:
        apart = [key for key in apart if key != "trainer.precision"]
    if len(known - {"-"}) > 1:
        apart.append("precision")
    # where `recipe` differs, `recipe.switch` need not be named
    return [key for key in apart if "." not in key or key.partition(".")[0] not in apart]


def _best(table: Table) -> list[Place]:
    """All cells that tie at the printed precision; none where there is nothing to compare."""
    axis, agree = table.compared
    keys = table.row_keys if axis == "column" else table.column_keys
    rivals: dict[Place, dict[Place, float]] = {}
    for (row, column), cell in table.cells.items():
        metric = table.metric_of(row, column)
        # for other logged values neither direction is better
        if cell.mean is None or row in table.references or metric.startswith("mean/"):
            continue
        along, across = (row, column) if axis == "column" else (column, row)
        same = tuple(text for key, text in zip(keys, along, strict=True) if key in agree)
        rivals.setdefault((across, same), {})[row, column] = cell.mean
    return [place for values in rivals.values() for place in _ties(table, values)]


def _ties(table: Table, values: Mapping[Place, float]) -> list[Place]:
    if len(values) < 2:
        return []
    metric = table.metric_of(*next(iter(values)))
    top = (max if table.higher_is_better(metric) else min)(values, key=values.__getitem__)
    digits = {}
    for at, mean in values.items():
        own = table.digits(*at)
        digits[at] = places(mean, metric) if own is None else own

    def ties(place: Place) -> bool:
        both = (scale(metric) * values[at] for at in (place, top))
        return len({round(mean, min(digits[place], digits[top])) for mean in both}) == 1

    return list(filter(ties, values))
