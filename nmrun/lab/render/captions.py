"""The lines above a table: what the numbers are, how they were compared, and what to beware of, if
anything. ``docs/statistics.md`` has the rest."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from nmrun import ranges
from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import two_digits, unit, words
from nmrun.lab.compare.overall import Overall
from nmrun.lab.compare.runs import same
from nmrun.lab.compare.statistics import FEWEST, Difference
from nmrun.lab.compare.tables import Table
from nmrun.lab.keys import options
from nmrun.lab.output import quantity
from nmrun.lab.render import cautions

SPLITS = {"test": "on the test split", "eval": "on the validation split"}
STAR = "*: p < 0.05"
POWER = "80 % power to find a true difference"


def title(table: Table, in_papers: bool = False) -> str:
    """What all runs of the table have in common: model and data set, optimizer, and epochs or
    steps. Model and data set are followed by settings that are not their defaults, one-shot pruning
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
    by_steps = has.get("trainer.steps", "null") != "null"
    key, word = ("trainer.steps", "step") if by_steps else ("trainer.epochs", "epoch")
    length = quantity(has[key], word) if has.get(key) else ""
    return ", ".join(filter(None, [where, has.get("optimizer"), rate, length, _pruning(table)]))


def _pruning(table: Table) -> str:
    """What was pruned in one shot, by which calibration data; nothing where all runs trained."""
    if not table.pruned:
        return ""
    what = "" if table.pruned == "all" else f"{table.pruned} "
    samples = table.shared.get("recipe.samples", "")
    number = f"{samples} " if samples else ""
    return f"{what}pruned in one shot with {number}calibration samples"


def _other_than(group: str, shared: Mapping[str, str], named: Collection[str]) -> str:
    """The settings of a model or data set that are not its defaults, in brackets; but for those that
    are ``named`` already."""
    name = shared[group]
    keys = options.keys(group, name) if name in options.names(group) else {}
    # lists of layers are long, and what another key decides is said by that
    usual = {
        key: ranges.value_text(field.default)
        for key, field in keys.items()
        if not isinstance(field.default, list) and not str(field.default).startswith("${")
    }
    other = [
        f"{key}={shared[f'{group}.{key}']}"
        for key, default in usual.items()
        if key not in named
        and f"{group}.{key}" in shared
        and not same(shared[f"{group}.{key}"], default)
    ]
    return f" ({', '.join(other)})" if other else ""


def caption(table: Table) -> list[str]:
    """The lines above the values."""
    split, slash, name = table.metric.removeprefix("best/").partition("/")
    best = table.metric.startswith("best/")
    weights = "best weights by validation" if best else "last weights"
    if table.several_metrics:
        what = table.metric.replace(",", ", ")
    elif slash:
        what = f"{name} {SPLITS.get(split, f'({split})')}{_in(table.metric)}, {weights}"
    else:
        what = f"{split}{_in(table.metric)}"
    line = f"{what}; mean +- standard deviation (number of seeds)"
    line += f"; bold: {bold(table)}" if table.best else ""
    return [*filter(None, [title(table), line]), *_cautions(table)]


def bold(table: Table) -> str:
    """What bold print marks: ``best sparse recipe of each column``; dense training is no rival."""
    axis, agree = table.compared
    keys = table.column_keys if axis == "row" else table.row_keys
    kind = "sparse " if table.references else ""
    who = "recipe" if "recipe" in keys else "setting"
    return f"best {kind}{who} of each {' and '.join([axis, *map(notation.setting, agree)])}"


def untested(gaps: Iterable[Difference]) -> str:
    """Why none of these differences has a p-value."""
    few = any(gap.n < FEWEST for gap in gaps)
    return "fewer than three seeds" if few else "each difference is the same with every seed"


def comparison(table: Table) -> list[str]:
    """The lines above the differences."""
    gaps = list(table.differences.values())
    tested = [gap for gap in gaps if gap.p is not None]
    units = ""
    if not table.several_metrics:
        units = _in(table.metric, difference=True)
    elif "accuracy" in table.metric:
        units = " (accuracies in percentage points)"
    whom = ", ".join(words(table.row_keys, row) for row in table.baseline)
    first = f"Difference to {whom}{units}, seed by seed, with its 95 % interval"
    beware = _line(cautions.of_differences(table))
    if not tested:
        return [f"{first} (number of seeds)", f"no test: {untested(gaps)}", *beware]
    star = f" ({STAR})" if any(gap.significant for gap in gaps) else ""
    notes = [f"moderated t-test, Holm's correction for {quantity(len(tested), 'comparison')}{star}"]
    if any(gap.n < FEWEST for gap in gaps):
        notes.append("no test for fewer than three seeds")
    if least := smallest(table):
        notes.append(f"{POWER} of {least} (median)")
    return [f"{first} and p-value (number of seeds)", "; ".join(notes), *beware]


def _cautions(table: Table) -> list[str]:
    """A line of what to know before comparing the values, if there is anything."""
    notes = cautions.of_values(table)
    if table.paper:
        notes.append(f"(paper): {table.paper_source}")
    if len(table.commits) > 1:
        notes.append(f"made by {len(table.commits)} versions of the code")
    return _line(notes)


def _line(notes: list[str]) -> list[str]:
    return ["; ".join(notes)] if notes else []


def smallest(table: Table) -> str:
    """The smallest difference that could have been detected in each metric: the median over the
    cells. Empty where no deviation is known."""
    by_metric: dict[str, list[float]] = {}
    for place, gap in table.differences.items():
        if gap.least is not None:
            by_metric.setdefault(table.metric_of(*place), []).append(gap.least)
    texts = []
    for metric, least in by_metric.items():
        where = f" in {metric}" if len(by_metric) > 1 else ""
        texts.append(f"{two_digits(statistics.median(least), metric)}{where}")
    return ", ".join(texts)


def _in(metric: str, difference: bool = False) -> str:
    name = unit(metric, difference)
    return f" in {name}" if name else ""


# --- over all cells -------------------------------------------------------------------------------


def over_all_cells(rows: Sequence[Overall], tables: Sequence[Table], several: bool) -> list[str]:
    """The lines above a table over all cells of each data set; ``several``: of more than one."""
    baseline = ", ".join(dict.fromkeys(" ".join(row) for t in tables for row in t.baseline))
    metrics = ", ".join(dict.fromkeys(table.metric for table in tables))
    by = "by data set" if several else "over all cells together"
    first = (
        f"Difference to {baseline} in {metrics} {by} (positive is better), "
        "in standard deviations of a run over its seeds, with 95 % intervals (number of cells)"
    )
    gaps = [part.gap for each in rows for part in each.parts.values()]
    notes = []
    if least := sorted(gap.least for gap in gaps if gap.least is not None):
        count, size = len(least), two_digits(statistics.median(least), "")
        star = f" ({STAR})" if any(gap.significant for gap in gaps) else ""
        notes += [
            f"moderated t-test, Holm's correction for {quantity(count, 'comparison')}{star}",
            f"{POWER} of {size} (median)",
        ]
    if several:
        notes.append("no test over all cells: the last column leaves out the data set in brackets")
    if any(gap.n < FEWEST for gap in gaps):
        notes.append("no test for fewer than three seeds of a data set")
    if any(gap.n > 1 and gap.spread is None for gap in gaps):
        notes.append(
            "no interval and no test where a column has only the two rows compared: deviations must be of other runs"
        )
    beware = _conditions(tables)
    if len({len(each.means) for each in rows}) > 1:
        beware.insert(0, "not all rows have the same cells")
    return [first, *("; ".join(line) for line in (notes, beware) if line)]


def _conditions(tables: Sequence[Table]) -> list[str]:
    """What to know before comparing the runs, and for which data sets."""
    by_note: dict[str, list[str]] = {}
    for table in tables:
        for note in [*cautions.of_values(table), *cautions.of_differences(table)]:
            by_note.setdefault(note, []).append(table.shared.get("dataset", ""))
    return [
        note if len(data) == len(tables) else f"{note} ({', '.join(dict.fromkeys(data))})"
        for note, data in by_note.items()
    ]
