"""The lines above a table: what the numbers are, how they were compared, and what to beware of, if
anything. ``docs/statistics.md`` has the rest."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from nmrun import ranges
from nmrun.lab.compare import notation
from nmrun.lab.compare.comparison import Comparison
from nmrun.lab.compare.notation import label, labels_of, two_digits, unit, words
from nmrun.lab.compare.runs import same
from nmrun.lab.compare.statistics import FEWEST, Difference
from nmrun.lab.compare.tables import FAR, SAMPLES, Run, Table
from nmrun.lab.keys import options
from nmrun.lab.output import quantity
from nmrun.oneshot import METHODS


def title(table: Table, in_papers: bool = False) -> str:
    """What all runs of the table have in common: model and data set, optimizer, and epochs, steps or
    budget. Model and data set are followed by settings that are not their defaults, one-shot pruning
    by its calibration data.

    Names are those of configs, or as they stand ``in_papers``.
    """
    has, named = dict(table.shared), set[str]()
    if in_papers:
        depth = has.get("model.depth")
        if depth and re.search(r"\d$", has.get("model", "")):  # as resnet20 has it in its name
            has["model"], named = re.sub(r"\d+$", depth, has["model"]), {"depth"}
        groups = (key for key in ("model", "dataset", "optimizer") if key in has)
        has |= {key: notation.written(has[key]) for key in groups}
    where = " on ".join(
        has[key] + _other_than(key, table.shared, named)
        for key in ("model", "dataset")
        if has.get(key, "-") != "-"
    )
    rate = f"learning rate {has['optimizer.lr']}" if "optimizer.lr" in has else ""
    parts = [where, has.get("optimizer"), rate, _length(table), _pruning(table)]
    return ", ".join(filter(None, parts))


def _length(table: Table) -> str:
    """How long all runs trained: by their budget, else steps, else epochs. Nothing where that
    differs."""
    trained = [run for run in table.records if run["recipe"] not in METHODS]
    for key in ("budget", "steps", "epochs"):
        values = [run.get(f"trainer.{key}") for run in trained]
        labels = labels_of(value if value == value else None for value in values)
        if labels - {"null"}:
            length, *others = labels
            said = f"{key} {length}" if key == "budget" else quantity(length, key[:-1])
            return "" if others else said
    return ""


def _pruning(table: Table) -> str:
    """What was pruned in one shot, by which calibration data; nothing where all runs trained."""
    recipes = [*dict.fromkeys(table.runs["recipe"])]
    pruned = [recipe for recipe in recipes if recipe in METHODS]
    what = "" if pruned == recipes else f"{', '.join(pruned)} "
    number = f"{table.shared[SAMPLES]} " if SAMPLES in table.shared else ""
    return f"{what}pruned in one shot with {number}calibration samples" if pruned else ""


def _other_than(group: str, shared: Mapping[str, str], named: Collection[str]) -> str:
    """The settings of a model or data set that are not its defaults, in brackets; but for those that
    are ``named`` already."""
    name, other = shared[group], []
    for key, field in (options.keys(group, name) if name in options.names(group) else {}).items():
        value, usual = shared.get(f"{group}.{key}"), field.default
        # lists of layers are long, and what another key decides is said by that
        if value is None or isinstance(usual, list) or str(usual).startswith("${"):
            continue
        if key not in named and not same(value, ranges.value_text(usual)):
            other.append(f"{key}={value}")
    return f" ({', '.join(other)})" if other else ""


def seeds(counts: Collection[int]) -> tuple[int, str]:
    """The number of seeds of most cells, and the words for it: no cell repeats it."""
    if not counts:
        return 0, "seeds"
    cells = Counter(counts)
    number = max(cells, key=lambda n: (cells[n], n))
    but = "" if len(cells) == 1 else ", or as many as stand in brackets"
    return number, quantity(number, "seed") + but


def caption(table: Table, number: str, in_papers: bool = False) -> list[str]:
    """The lines above the values, which are over a ``number`` of seeds."""
    what = ", ".join(map(notation.metric, table.metric.split(",")))
    line = f"{what}; mean +- standard deviation over {number}"
    if table.best:  # dense training is no rival
        axis, agree = table.compared
        kind = "best sparse one" if table.references else "best one"
        line += f"; bold: {kind} of each {' and '.join([axis, *map(notation.setting, agree)])}"
    notes = [*cautions(table), *_tuned(table)]
    if table.paper:
        notes.append(f"(paper): {table.paper_source}")
    # a run of a CSV file or outside of git has none
    commits = {c[:7] for run in table.records if isinstance(c := run.get("commit"), str)}
    if len(commits) > 1:
        notes.append(f"made by {len(commits)} versions of the code")
    return [text for text in (title(table, in_papers), line, "; ".join(notes)) if text]


# --- differences ----------------------------------------------------------------------------------


def comparison(table: Table, number: str) -> list[str]:
    """The lines above the differences, which are over a ``number`` of seeds."""
    several = " (accuracies in percentage points)" if "accuracy" in table.metric else ""
    name = unit(table.metric, difference=True)
    of_metrics = "metric" in (*table.row_keys, *table.column_keys)
    units = several if of_metrics else f" in {name}" if name else ""
    with_p = any(gap.p is not None for gap in table.differences.values())
    shown = "its 95 % interval and p-value" if with_p else "its 95 % interval"
    whom = ", ".join(words(table.row_keys, row) for row in table.baseline)
    first = f"Difference to {whom}{units}, seed by seed, with {shown}, over {number}"
    return [first, tests(table)]


def tests(table: Table) -> str:
    """How the differences of a table were tested, and what that could have shown."""
    gaps = table.differences.values()
    few = any(gap.n < FEWEST for gap in gaps)
    if all(gap.p is None for gap in gaps):
        why = "fewer than three seeds" if few else "each difference is the same with every seed"
        return f"no test: {why}"
    by_metric: dict[str, list[Difference]] = {}
    for place, gap in table.differences.items():
        by_metric.setdefault(table.metric_of(*place), []).append(gap)
    test, power = _tested(by_metric)
    return "; ".join([test, *(["no test for fewer than three seeds"] if few else []), power])


def _tested(by_metric: Mapping[str, Iterable[Difference]]) -> list[str]:
    """The test, and the smallest difference that it could have found in each metric: the median over
    the cells."""
    gaps = [gap for some in by_metric.values() for gap in some]
    number = sum(gap.p is not None for gap in gaps)
    star = " (*: p < 0.05)" if any(gap.significant for gap in gaps) else ""
    known = {
        metric: least
        for metric, some in by_metric.items()
        if (least := [gap.least for gap in some if gap.least is not None])
    }  # of what was tested it is known
    sizes = [
        two_digits(statistics.median(least), metric) + (f" in {metric}" if len(known) > 1 else "")
        for metric, least in known.items()
    ]
    power = f"80 % power to find a true difference of {', '.join(sizes)} (median)"
    test = f"moderated t-test, Holm's correction for {quantity(number, 'comparison')}{star}"
    return [test, power]


def over_all_cells(comparison: Comparison) -> list[str]:
    """The lines above a table over all cells of each data set."""
    rows, tables = comparison.overall, comparison.tables
    whom = dict.fromkeys(words(t.row_keys, row) for t in tables for row in t.baseline)
    metrics = ", ".join(dict.fromkeys(table.metric for table in tables))
    number = len(comparison.data_sets)
    by = "by data set" if number > 1 else "over all cells together"
    parts = [part for each in rows for part in each.parts.values()]
    gaps = [part.gap for part in parts]
    shown = ", with 95 % intervals" if any(gap.low is not None for gap in gaps) else ""
    first = (
        f"Difference to {', '.join(whom)} in {metrics} {by} (positive is better), "
        f"in standard deviations of a run over its seeds{shown} (number of cells)"
    )
    notes = _tested({"": gaps}) if any(gap.p is not None for gap in gaps) else []
    if number == 2:
        notes.append("no test over all cells")
    if number > 2:
        notes.append("no test over all cells: the last column leaves out the data set in brackets")
    if any(gap.n < FEWEST for gap in gaps):
        notes.append("no test for fewer than three seeds of a data set")
    # a difference between runs that are all equal has no test either
    if any(p.gap.n >= FEWEST and p.gap.p is None and any(p.means) for p in parts):
        notes.append("no test where the two compared rows, or one more of two seeds, give the unit")
    of_data_sets = by_data_set(tables, cautions) + by_data_set(tables, _tuned)
    return [first, *("; ".join(line) for line in (notes, of_data_sets) if line)]


def by_data_set(tables: Sequence[Table], notes: Callable[[Table], list[str]]) -> list[str]:
    """The notes on some tables, and of which data sets each is."""
    by_note: dict[str, list[str]] = {}
    for table in tables:
        for note in notes(table):
            by_note.setdefault(note, []).append(table.shared.get("dataset", ""))
    return [
        note if len(data) == len(tables) else f"{note} ({', '.join(dict.fromkeys(data))})"
        for note, data in by_note.items()
    ]


# --- what to know before comparing ----------------------------------------------------------------


def cautions(table: Table) -> list[str]:
    """Notes on all runs: in what they differ, how the best weights were chosen, what failed; none
    where all is well."""
    return [*_unlike(table), *_chosen(table), *_failed(table), *_switched(table)]


def _unlike(table: Table) -> list[str]:
    """The settings, and seeds, that differ between cells though no row or column names them."""
    keys = list(map(notation.setting, table.differing))
    # a run without a value is counted in its cell
    seeds = {frozenset(cell.values) for cell in table.cells.values() if not cell.without}
    if len(seeds) > 1:
        keys.append("seeds")
    return [f"not the same in all cells: {', '.join(keys)}"] if keys else []


def _chosen(table: Table) -> list[str]:
    """From how many epochs the best weights of a run were chosen, where runs differ in that."""
    if "best/" not in table.metric:
        return []
    epochs = dict(sorted(_by_rows(table, _candidates).items()))
    several = len(epochs) > 1
    return [f"the best weights are of epochs with N:M weights: {_each(epochs)}"] if several else []


def _tuned(table: Table) -> list[str]:
    """How the settings of the runs were chosen."""
    tuned = _by_rows(table, _trials)
    if not tuned.keys() - {"none"}:
        return []
    return [f"each cell tuned before by {_each(tuned) if len(tuned) > 1 else next(iter(tuned))}"]


def _trials(run: Run) -> str:
    """By how many trials of ``nmrun tune`` the settings of a run were chosen."""
    over, metric, trials = (run.get(f"tuned.{key}") for key in ("over", "by", "trials"))
    if not isinstance(over, str) or not isinstance(metric, str):
        return "none"
    count = label(trials)
    whom = "" if count == "1" else "the best two "
    return f"{quantity(count, 'trial')} by {notation.bare(metric)}, {whom}with three seeds"


def _candidates(run: Run) -> str:
    """From how many epochs the best weights of a run were chosen."""
    number = label(run.get("best/candidates", math.nan))
    return "" if run["status"] != "finished" else "not known how many" if number == "-" else number


def _by_rows(table: Table, fact: Callable[[Run], str]) -> dict[str, dict[str, None]]:
    """The rows, in order, by what is so of their runs."""
    keys = tuple(key for key in table.row_keys if key != "metric")
    rows: dict[str, dict[str, None]] = {}
    for run in table.records:
        if said := fact(run):
            rows.setdefault(said, {})[words(keys, tuple(label(run[key]) for key in keys))] = None
    return rows


def _each(by_fact: Mapping[str, Iterable[str]]) -> str:
    return ", ".join(f"{fact} ({', '.join(rows)})" for fact, rows in by_fact.items())


def _failed(table: Table) -> list[str]:
    """The runs that are in no mean."""
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
    return notes


def switches(table: Table) -> Counter[str]:
    """What decided STEP's switch, by runs: its ``rule`` or ``t_max``, or ``unknown``."""
    counts = Counter[str]()
    for run in table.records:
        if run["status"] != "finished":
            continue
        if (by := run.get("switched_by")) in ("rule", "t_max"):
            counts[by] += 1
        elif label(run.get("recipe.switch", "-")) in ranges.SWITCHES:
            counts["unknown"] += 1
    return counts


def _switched(table: Table) -> list[str]:
    """In how many runs STEP's rule decided the switch, and in how many ``t_max`` did."""
    counts = switches(table)
    if not counts["t_max"] and not counts["unknown"]:
        return []
    total = quantity(counts.total(), "run")
    if counts["unknown"] == counts.total():
        return [f"not known whether STEP's rule decided its switch: {total}"]
    parts = [f"STEP's rule decided its switch in {counts['rule']} of {total}"]
    if counts["t_max"]:
        parts.append(f"t_max in {counts['t_max']}")
    if counts["unknown"]:
        parts.append(f"not known of {counts['unknown']}")
    return [", ".join(parts)]
