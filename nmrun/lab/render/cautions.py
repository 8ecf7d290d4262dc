"""What to know of a table's runs before comparing them. Each function gives notes; none if all is
well."""

from __future__ import annotations

import math
from collections import Counter

from nmrun import ranges
from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import Key, half_as_good, label, printed, words
from nmrun.lab.compare.tables import FAR, SCORES, Table
from nmrun.lab.output import quantity


def of_values(table: Table) -> list[str]:
    """Notes on all runs: how they were chosen, in what they differ, what is missing, what failed."""
    return [*unlike(table), *selection(table), *failures(table), *switches(table), *control(table)]


def of_differences(table: Table) -> list[str]:
    """Notes on the rows and the baseline that they are compared with."""
    notes = []
    if table.across:
        notes.append(f"compared across different {', '.join(map(notation.setting, table.across))}")
    if table.unpaired:
        whom = ", ".join(words(table.row_keys, row) for row in table.baseline)
        unpaired = ", ".join(dict.fromkeys(_place(table, *place) for place in table.unpaired))
        notes.append(f"no common seed with {whom}: {unpaired}")
    return notes


def unlike(table: Table) -> list[str]:
    """The settings, and seeds, that differ between cells though no row or column names them."""
    keys = list(map(notation.setting, table.differing))
    # a run without a value is counted in its cell
    seeds = {frozenset(cell.values) for cell in table.cells.values() if not cell.without}
    if len(seeds) > 1:
        keys.append("seeds")
    return [f"not the same in all cells: {', '.join(keys)}"] if keys else []


def selection(table: Table) -> list[str]:
    """How the runs were chosen: the best weights of each, and its settings."""
    split, _, _ = table.metric.removeprefix("best/").partition("/")
    tuning = tuned(table)
    choices, notes = [], []
    if split == "eval" and not table.several_metrics:
        if table.metric.startswith("best/"):
            choices.append("weights")
        if tuning:
            choices.append("settings")
    if choices:
        notes.append(f"these {' and '.join(choices)} were chosen by this very split")
    if table.candidates:
        notes.append(f"the best weights are of epochs with N:M weights: {_chosen_from(table)}")
    return notes + tuning


def tuned(table: Table) -> list[str]:
    """By how many trials of ``nmrun tune`` each row was tuned. Rows that differ in ``tuned.trials``
    are named by that alone; empty for none."""
    keys = [key for key in table.row_keys if key != "metric"]
    by_trials: dict[str, dict[str, None]] = {}  # names of rows, in order
    for run in table.runs.to_dict("records"):
        name = " ".join(label(run[key]) for key in keys)
        trials = "none"
        if isinstance(run.get("tuned.over"), str):
            count, by = run["tuned.trials"], notation.bare(run["tuned.by"])
            trials = f"{count} trials by {by}, the best two with three seeds"
        number = f"tuned.trials {label(run.get('tuned.trials', math.nan))}"
        by_trials.setdefault(trials, {})[number if "tuned.trials" in keys else name] = None
    if set(by_trials) <= {"none"}:
        return []
    several = [f"{how} ({', '.join(rows)})" for how, rows in by_trials.items()]
    each = next(iter(by_trials)) if len(by_trials) == 1 else ", ".join(several)
    return [f"each cell tuned before by {each}"]


def _chosen_from(table: Table) -> str:
    return ", ".join(
        f"{'not known how many' if number == '-' else number} "
        f"({', '.join(words(table.row_keys, row) for row in rows)})"
        for number, rows in table.candidates.items()
    )


def failures(table: Table) -> list[str]:
    """The runs that are in no mean, and cells whose seeds are so far apart that some may have
    failed."""
    # a dense cell stands in several columns
    cells = {id(cell): cell for cell in table.cells.values()}.values()
    without = sum((Counter(cell.without) for cell in cells), Counter())
    without["failed"] -= table.failed
    notes = [
        f"{quantity(count, 'run')} {reason}, in no mean"
        for reason, count in without.items()
        if count > 0
    ]
    if table.failed:
        notes.append(
            f"{quantity(table.failed, 'seed')} failed: worse than the median of the cell by more than {FAR:g} deviations and a tenth"
        )
    return notes + _far_apart(table)


def _far_apart(table: Table) -> list[str]:
    """Cells with a seed half as good as another one, or worse, where none was taken for failed."""
    apart = {}
    for (row, column), cell in table.cells.items():
        metric, values = table.metric_of(row, column), cell.values.values()
        if metric.partition("/")[0] not in SCORES or not values:
            continue
        low, high = min(values), max(values)
        higher = table.higher_is_better(metric)
        worst, best = (low, high) if higher else (high, low)
        if half_as_good(worst, best, higher):
            ends = f"{printed(low, metric)} to {printed(high, metric)}"
            apart[id(cell)] = f"{_place(table, row, column)} ({ends})"
    where = ", ".join(apart.values())
    return [f"seeds far apart, of which some may have failed: {where}"] if apart else []


def switches(table: Table) -> list[str]:
    """In how many runs STEP's rule decided the switch, and in how many ``t_max`` did."""
    counts = Counter[str]()
    for run in table.runs.to_dict("records"):
        if run["status"] != "finished":
            continue
        if (by := run.get("switched_by")) in ("rule", "t_max"):
            counts[by] += 1
        elif label(run.get("recipe.switch", "-")) in ranges.SWITCHES:
            counts["unknown"] += 1
    if not counts["t_max"] and not counts["unknown"]:
        return []
    total = quantity(counts.total(), "run")
    if counts.keys() == {"unknown"}:
        return [f"not known whether STEP's rule decided its switch: {total}"]
    parts = [f"STEP's rule decided its switch in {counts['rule']} of {total}"]
    if counts["t_max"]:
        parts.append(f"t_max in {counts['t_max']}")
    if counts["unknown"]:
        parts.append(f"not known of {counts['unknown']}")
    return [", ".join(parts)]


def control(table: Table) -> list[str]:
    """A note if sparse training is not compared with dense training."""
    return [] if table.control or table.pruned == "all" else ["no dense run under these settings"]


def _place(table: Table, row: Key, column: Key) -> str:
    return f"{words(table.row_keys, row)} at {words(table.column_keys, column)}"
