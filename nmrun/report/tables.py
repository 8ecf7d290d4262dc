"""The comparison: runs folded into cells, one row a recipe, one column a ratio. ``formats`` writes
it down.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from nmrun.config.identity import GROUPS, IRRELEVANT
from nmrun.config.metric import higher_is_better
from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError
from nmrun.recipes import RECIPES
from nmrun.registry import did_you_mean
from nmrun.report.statistics import Cell, Difference, holm, paired, shown, summarise

# the labels of a row or of a column, one for each config key that it stands for
Key = tuple[str, ...]
Run = Mapping[Any, Any]  # a row of ``collect``

RECIPE_ORDER = tuple(RECIPES)


@dataclass(frozen=True)
class Table:
    """Cells by (row, column).

    ``best`` are the best cells of each column; ``references`` the rows without a ratio, whose one
    value stands in every column; ``shared`` what all runs have in common; ``differing`` the
    settings that are not the same in all cells, though no row or column names them; ``commits`` the
    versions of the code. ``differences`` to the rows ``baseline`` in the same column, their
    p-values corrected for their number. ``statistic``: what stands in a cell, ``mean``, ``median``
    or ``best``. ``paper``: published figures as they are printed, by row and column, and where they
    stand, ``paper_source``.
    """

    metric: str
    statistic: str
    row_keys: Key
    column_keys: Key
    rows: list[Key]
    columns: list[Key]
    cells: dict[tuple[Key, Key], Cell]
    best: set[tuple[Key, Key]]
    references: set[Key]
    shared: dict[str, str]
    differing: list[str]
    commits: list[str]
    baseline: list[Key] = field(default_factory=list)
    test: str = ""
    differences: dict[tuple[Key, Key], Difference] = field(default_factory=dict)
    paper: dict[str, dict[str, str]] = field(default_factory=dict)
    paper_source: str = ""

    def metric_of(self, row: Key, column: Key) -> str:
        """The metric of a cell: where rows or columns are metrics, its own."""
        own = [
            text
            for key, text in zip(self.row_keys + self.column_keys, row + column, strict=True)
            if key == "metric"
        ]
        return own[0] if own else self.metric


def build(
    runs: pd.DataFrame,
    metric: str,
    row_keys: Sequence[str],
    column_keys: Sequence[str],
    statistic: str = "mean",
) -> Table:
    """Fold runs into a table. Columns go from dense to sparse, recipes in ``RECIPE_ORDER``, other
    labels by size or alphabet.

    Raises ConfigError where a cell would average over runs that differ in more than their seed,
    naming the keys, or would count a seed twice.
    """
    rows, columns = tuple(row_keys), tuple(column_keys)
    members: dict[tuple[Key, Key], list[Run]] = {}
    every = metric.split(",") if "metric" in (*rows, *columns) else [metric]
    for run in ({**run, "metric": each} for run in runs.to_dict("records") for each in every):
        place = (tuple(label(run[k]) for k in rows), tuple(label(run[k]) for k in columns))
        members.setdefault(place, []).append(run)
    for (row, column), group in members.items():
        _check_alike(group, f"{' '.join(row)} at {' '.join(column)}", rows, columns)

    cells = {place: _cell(group) for place, group in members.items()}
    references: set[Key] = set()
    if columns == ("sparsity",):
        with_ratio = {row for row, column in members if column != ("dense",)}
        references = {row for row, _ in members} - with_ratio if with_ratio else set()
    column_labels = sorted({column for row, column in members if row not in references}, key=_order)
    for row in references:
        dense = cells.pop((row, ("dense",)))
        cells |= {(row, column): dense for column in column_labels}
    row_labels = sorted({row for row, _ in cells}, key=_order)

    everything = [run for group in members.values() for run in group]
    named = {"recipe", "sparsity", *rows, *columns}
    keys = sorted({key for run in everything for key in run} - {"seed"})
    shared = {
        key: label(everything[0][key])
        for key in keys
        if len({label(run[key]) for run in everything}) == 1
    }
    differing = [
        key
        for key in _differing(everything)
        if key not in named and key.partition(".")[0] not in named
    ]
    commits = sorted({label(run["commit"])[:7] for run in everything if run.get("commit")})
    table = Table(
        metric,
        statistic,
        rows,
        columns,
        row_labels,
        column_labels,
        cells,
        set(),
        references,
        shared,
        differing,
        commits,
    )
    for column in column_labels:
        table.best.update((row, column) for row in _best(table, column))
    return table


def compare(table: Table, baseline: str, test: str = "t") -> Table:
    """The same with ``differences`` to the row named ``baseline``: by all its labels, or by that of
    the recipe alone (where each row is compared with the one of that recipe that agrees with it in
    all that is not of the recipe).

    Raises ConfigError if there is no such row, or if no other row shares a seed with it.
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

    def context(row: Key) -> list[str]:
        return [
            text
            for key, text in zip(table.row_keys, row, strict=True)
            if key.partition(".")[0] != "recipe"
        ]

    found: dict[tuple[Key, Key], Difference] = {}
    for (row, column), cell in table.cells.items():
        own = every if baseline in names else [one for one in every if context(one) == context(row)]
        other = table.cells.get((own[0], column)) if own and row not in every else None
        if other is not None and (gap := paired(cell, other, test)) is not None:
            found[row, column] = gap
    if not found:
        raise ConfigError(
            f"--baseline {baseline}: no other row has runs of the same seeds; the test pairs runs by their seed"
        )
    return replace(table, baseline=every, test=test, differences=holm(found))


def label(value: Any) -> str:
    """A config value as a command line has it: ``null``, ``true``, ``0.001``, ``2:4``; ``-`` for a
    key that the run has not.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "-" if value != value else str(value)


def words(key: Key) -> str:
    """The values of a key, without a dash for what a run has not."""
    return " ".join(value for value in key if value != "-") or "-"


def printed(value: float, metric: str) -> str:
    """A mean as every format shows it: accuracies in percent with one decimal, everything else with
    four significant digits.
    """
    return f"{100 * value:.1f}" if "accuracy" in metric else significant(value, 4)


def significant(value: float, digits: int) -> str:
    """No exponent where whole numbers of up to eight digits will do: 1.234, 12340, 3.782e+11."""
    if abs(value) >= 1e8:
        return f"{value:.{digits - 1}e}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _cell(group: Sequence[Run]) -> Cell:
    values: dict[object, float] = {}
    without = []
    for run in group:
        value = run.get(run["metric"])
        if run["status"] != "finished":
            without.append(run["status"])
        elif value is None or value != value:
            without.append("no value")
        else:
            values[run["seed"]] = float(value)
    return summarise(values, without)


def _check_alike(group: Sequence[Run], place: str, rows: Key, columns: Key) -> None:
    differing = _differing(group)
    if differing:
        combinations = Counter(tuple(label(run[key]) for key in differing) for run in group)
        common = combinations.most_common(1)[0][0]
        choice = " ".join(
            shlex.quote(f"{key}={value}")
            for key, value in zip(differing, common, strict=True)
            if value != "-"
        )
        raise ConfigError(
            f"{place} would average over runs that differ in {', '.join(differing)}; "
            f"tell them apart with --rows {','.join([*rows, *differing])}"
            + (f", or choose with --filter {choice}" if choice else "")
        )
    seed, count = Counter(run["seed"] for run in group).most_common(1)[0]
    if count > 1:
        folders = ", ".join(str(run["folder"]) for run in group if run["seed"] == seed)
        raise ConfigError(
            f"{place} would count seed {seed} {count} times: {folders}; name the folders of one set of runs only"
        )


def _differing(runs: Sequence[Run]) -> list[str]:
    """The settings that change a result (all that a run's identity covers, but for the seed) and
    are not the same in all runs.
    """
    keys = [
        key
        for key in dict.fromkeys(k for run in runs for k in run)
        for group, _, name in [str(key).partition(".")]
        if group in GROUPS and group != "seed" and name not in IRRELEVANT.get(group, ())
    ]
    found = [key for key in keys if len({label(run[key]) for run in runs}) > 1]
    # `recipe` says it for `recipe.switch`
    return [key for key in found if "." not in key or key.partition(".")[0] not in found]


def _best(table: Table, column: Key) -> list[Key]:
    """All rows that tie at the printed precision; none where there is nothing to compare."""
    values = {}
    for row in table.rows:
        metric, cell = table.metric_of(row, column), table.cells.get((row, column))
        value = None if cell is None else shown(cell, table.statistic, higher_is_better(metric))
        # of what was logged: neither way is better
        judged = metric.partition("/")[0] not in (
            "mean",
            "positive",
        )
        if judged and row not in table.references and value is not None:
            values[row] = float(printed(value, metric))
    if len(values) < 2 or "metric" in table.row_keys:
        return []
    top = (max if higher_is_better(table.metric_of(table.rows[0], column)) else min)(
        values.values()
    )
    return [row for row, value in values.items() if value == top]


def _order(labels: Key) -> tuple[tuple[int, float, int, str], ...]:
    return tuple(_order_of_one(each) for each in labels)


def _order_of_one(text: str) -> tuple[int, float, int, str]:
    if text in RECIPE_ORDER:
        return (0, RECIPE_ORDER.index(text), 0, "")
    try:
        pattern = Pattern.parse(text)
        return (1, -pattern.density, pattern.m, "")  # densest first; 2:4 before 4:8
    except PatternError:
        pass
    try:
        return (2, float(text), 0, "")
    except ValueError:
        return (3, 0.0, 0, text)
