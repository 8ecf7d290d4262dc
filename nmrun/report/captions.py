"""What stands above a table: what the numbers are, and what to know when comparing them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from nmrun.config import reference
from nmrun.report import names, settings
from nmrun.report.labels import words
from nmrun.report.numbers import places, printed, unit
from nmrun.report.statistics import FEWEST, Difference, seeds_for_half
from nmrun.report.tables import Table

SPLITS = {"test": "on the test split", "eval": "on the validation split"}
NOTHING_SHOWN = "so few seeds could not have shown any difference, however large"
TESTS = {"t": "paired t-test", "wilcoxon": "Wilcoxon's signed-rank test"}


def title(table: Table, own: Mapping[str, str] | None = None) -> str:
    """What all runs of the table have in common, in short: the model and the data set, each with the
    settings that are not its config's own, the optimizer and the epochs.

    Args:
        table: the table.
        own: names that the user gave; None: names as they are in configs.
    """
    has = dict(table.shared)
    if own is not None:
        groups = (key for key in ("model", "dataset", "optimizer") if key in has)
        has |= {key: names.written(has[key], own) for key in groups}
    where = " on ".join(
        has[key] + _other_than(key, table.shared) for key in ("model", "dataset") if key in has
    )
    optimizer = (
        " lr ".join(has[key] for key in ("optimizer", "optimizer.lr") if key in has)
        if "optimizer" in has
        else ""
    )
    count = has.get("trainer.epochs", "")
    epochs = count and f"{count} epoch{'s' * (count != '1')}"
    return ", ".join(filter(None, [where, optimizer, epochs]))


def _other_than(group: str, shared: Mapping[str, str]) -> str:
    """The settings of a model or data set that are not those of its config, in brackets."""
    options = [each for each in reference.options(group) if each.name == shared[group]]
    other = [
        f"{key.name.partition('.')[2]}={shared[key.name]}"
        for option in options
        for key in option.keys
        # lists of layers are long, and what another key decides is said by that
        if key.name in shared
        and not key.default.startswith(("[", "${"))
        and not settings.same(shared[key.name], key.default)
    ]
    return f" ({', '.join(other)})" if other else ""


def caption(table: Table) -> str:
    """Of the values."""
    split, slash, name = table.metric.removeprefix("best/").partition("/")
    best = table.metric.startswith("best/")
    weights = "the best weights by validation" if best else "the last weights"
    if "metric" in (*table.row_keys, *table.column_keys):
        what = table.metric.replace(",", ", ")
    elif slash:
        what = f"{name} {SPLITS.get(split, f'({split})')}{_in(table.metric)}, {weights}"
    else:
        what = f"{split}{_in(table.metric)}"
    how = "mean +- standard deviation" if table.statistic == "mean" else table.statistic
    notes = [f"{title(table)}: {what}; {how} over seeds (number of runs)"]
    notes += selection(table) + table.tuned[1:]
    if any(len(columns) > 1 for columns in table.stands.values()):
        others = [key for key in table.column_keys if key != "sparsity"]
        its = f" of its {' and '.join(others)}" if others else ""
        notes.append(f"dense has no ratio and stands in every column{its}")
    if table.best:
        axis, agree = table.compared
        notes.append(f"best of each {' and '.join([axis, *agree])} in bold")
    if table.paper:
        notes.append(f"(paper): {table.paper_source}")
    notes += unlike(table)
    if len(table.commits) > 1:
        notes.append(
            f"made by {len(table.commits)} versions of the code: {', '.join(table.commits)}"
        )
    return "; ".join(notes)


def comparison(table: Table) -> str:
    """Of the differences."""
    gaps = list(table.differences.values())
    tested = [gap for gap in gaps if gap.p is not None]
    several = "metric" in (*table.row_keys, *table.column_keys)
    units = (
        (" (accuracies in percentage points)" if "accuracy" in table.metric else "")
        if several
        else _in(table.metric, difference=True)
    )
    notes = [
        f"Difference to {', '.join(words(table.row_keys, row) for row in table.baseline)}{units} over the seeds that both have (number of seeds), "
        "each with its own 95 % interval of Student's t, whose spread is at least one step of the metric"
    ]
    if tested:
        notes.append(
            f"{TESTS[table.test]}, two-sided, p corrected for {len(tested)} comparisons by Holm's method; below 0.05 in bold"
        )
        notes += _least(table)
    few = "fewer than three seeds" if tested else "fewer than three seeds everywhere"
    notes += [f"no test for {few}"] if any(gap.n < FEWEST for gap in gaps) else []
    notes += ["no interval for one seed"] if any(gap.n == 1 for gap in gaps) else []
    return "; ".join(notes + across(table) + unlike(table))


def selection(table: Table) -> list[str]:
    """By what the runs were chosen: the best weights of each, and its settings."""
    split, _, _ = table.metric.removeprefix("best/").partition("/")
    best, tuned = table.metric.startswith("best/"), bool(table.tuned)
    several = "metric" in (*table.row_keys, *table.column_keys)
    own = [*["weights"] * best, *["settings"] * tuned] * (split == "eval" and not several)
    notes = [f"these {' and '.join(own)} were chosen by this very split"] * bool(own)
    if table.candidates:
        notes.append(f"the best weights are of epochs with N:M weights: {_chosen_from(table)}")
    return notes + table.tuned[:1]


def unlike(table: Table) -> list[str]:
    """The settings that no row or column names and that are not the same in all cells."""
    keys = ", ".join(table.differing)
    return [f"not the same in all cells: {keys}"] if keys else []


def across(table: Table) -> list[str]:
    """In what rows differ from the baseline that they are compared with."""
    return [f"compared across different {', '.join(table.across)}"] if table.across else []


def smallest(table: Table, ends: bool = True) -> str:
    """The smallest difference that could have been shown in each metric, median over the cells;
    empty where none could have been, however large.

    Args:
        table: with differences.
        ends: give the range as well.
    """
    by_metric: dict[str, list[Difference]] = {}
    for place, gap in table.differences.items():
        if gap.least is not None:
            by_metric.setdefault(table.metric_of(*place), []).append(gap)
    found = []
    for metric, gaps in by_metric.items():
        finite = sorted(gap.least for gap in gaps if gap.least is not None and gap.least < math.inf)
        if not finite:
            return ""

        def text(value: float, name: str = metric) -> str:
            return printed(value, name, places(value, name, value / 5))  # two digits

        of = f" in {metric}" if len(by_metric) > 1 else ""
        rest = f" ({text(finite[0])} to {text(finite[-1])})" if ends and len(finite) > 1 else ""
        found.append(f"{text(statistics.median(finite))}{rest}{of}")
    return ", ".join(found)


def _least(table: Table) -> list[str]:
    tests = sum(gap.p is not None for gap in table.differences.values())
    if not (found := smallest(table)):
        return [NOTHING_SHOWN]
    by = "" if table.test == "t" else ", reckoned for the t-test"
    counts = {gap.n for gap in table.differences.values() if gap.least is not None}
    more = (
        []
        if len(counts) > 1
        else [f"half of it would take {seeds_for_half(n, 0.05 / tests)} seeds" for n in counts]
    )
    return [
        f"smallest difference that these seeds would have shown with a probability of 0.8, median (and range) over the cells, "
        f"at the level 0.05/{tests} that the correction begins with{by}: {found}",
        *more,
    ]


def _chosen_from(table: Table) -> str:
    return ", ".join(
        f"{'not known how many' if number == '-' else number} "
        f"({', '.join(words(table.row_keys, row) for row in rows)})"
        for number, rows in table.candidates.items()
    )


def _in(metric: str, difference: bool = False) -> str:
    name = unit(metric, difference)
    return f" in {name}" if name else ""
