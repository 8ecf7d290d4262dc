"""``nmrun table --overall``: the rows against the baseline over all cells, written down."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from nmrun.errors import ConfigError
from nmrun.lab.report import chosen, latex, names, overall
from nmrun.lab.report.captions import across, selection, unlike
from nmrun.lab.report.formats import Grid, html_table, markdown
from nmrun.lab.report.labels import short
from nmrun.lab.report.numbers import interval, p_value, places, printed
from nmrun.lab.report.overall import Mean, Overall, better, mean
from nmrun.lab.report.pages import document
from nmrun.lab.report.records import Lines
from nmrun.lab.report.statistics import FEWEST
from nmrun.lab.report.tables import Table

ALL = "all cells"
STAR = "*: p < 0.05"
METHOD = (
    "The unit of a cell is the median over the other rows of its column; every cell counts alike. Seeds of one data set "
    "are observations, and their spread is that of the data set. Tests are two-sided."
)


def render(
    rows: Sequence[Overall],
    tables: Sequence[Table],
    style: str,
    labels: Mapping[str, str],
    method: bool = False,
) -> str:
    """Write the comparison over all cells.

    Args:
        rows, tables: as of :func:`compared`.
        style: ``markdown``, ``latex`` or ``html`` (one page).
        labels: the user's names, for LaTeX.
        method: as of :func:`nmrun.lab.report.formats.render`.
    """
    drawn = _grid(rows, tables)
    if style == "latex":
        return _latex(drawn, labels)
    if style == "html":
        return document("page.html", title="nmrun: all cells together", body=html_table(drawn))
    return markdown(drawn, method)


def compared(options: argparse.Namespace) -> tuple[list[Overall], list[Table]]:
    """Compare over all cells.

    Args:
        options: as of :func:`nmrun.lab.report.chosen.tables`.

    Returns:
        The rows, and the tables whose cells they are of.

    Raises:
        ConfigError: as there, and for what has no comparison over all cells.
    """
    if not options.baseline:
        raise ConfigError("--overall compares with a row: name it with --baseline")
    if options.test != "t":
        raise ConfigError(
            f"--overall --test {options.test}: over all cells there is the t-test only"
        )
    if "metric" in f"{options.rows},{options.cols}".split(","):
        raise ConfigError("--overall: one metric at a time, which is no row or column")
    tables = chosen.tables(options)
    return overall.of(tables, options.baseline), tables


def lines(rows: Sequence[Overall], tables: Sequence[Table]) -> Lines:
    """List a line for each row and data set, and one for each row over ``all cells``.

    Columns: the keys of the row, dataset, cells, better (in how many of them), the difference in
    standard deviations of a run, its interval, and its degrees of freedom; over all cells the
    p-value and the smallest difference that could have been shown as well. None: undefined.

    Args:
        rows, tables: as of :func:`compared`.
    """
    numbers = ["cells", "better", "difference", "low", "high", "p", "least", "freedom"]
    found: Lines = [[*tables[0].row_keys, "dataset", *numbers]]
    for each in rows:
        by_data = [(data, part.means, mean([part])) for data, part in each.parts.items()]
        for data, means, one in [*by_data, (ALL, each.means, each.mean)]:
            tested = (one.p, one.least) if data == ALL else (None, None)
            interval = (one.value, one.low, one.high)
            found.append(
                [*each.row, data, len(means), better(means), *interval, *tested, one.freedom]
            )
    return found


def _grid(rows: Sequence[Overall], tables: Sequence[Table]) -> Grid:
    keys = tables[0].row_keys
    every = list(dict.fromkeys(data for each in rows for data in each.parts))
    apart = every if len(every) > 1 else []
    written = [
        (
            [short(label) for label in each.row],
            [
                *((_part(each, data), False) for data in apart),
                (_interval(each.mean) + p_value(each.mean.p) + "*" * each.mean.significant, False),
                (f"{better(each.means)} of {len(each.means)}", False),
            ],
        )
        for each in rows
    ]
    return Grid(
        _caption(rows, tables, apart), len(keys), [*keys, *apart, ALL, "better in"], written, METHOD
    )


def _part(each: Overall, data: str) -> str:
    if data not in each.parts:
        return "-"
    part = each.parts[data]
    return f"{_interval(mean([part]))} ({len(part.means)})"


def _interval(found: Mean) -> str:
    return interval(found.value, found.low, found.high, "", found.error)


def _caption(rows: Sequence[Overall], tables: Sequence[Table], apart: Sequence[str]) -> list[str]:
    baseline = ", ".join(dict.fromkeys(" ".join(row) for t in tables for row in t.baseline))
    metrics = ", ".join(dict.fromkeys(table.metric for table in tables))
    first = (
        f"Difference to {baseline} in {metrics} over all cells together, better is positive, in standard deviations "
        "of a run over its seeds, with 95 % intervals" + " (number of cells)" * bool(apart)
    )
    notes = []
    if least := sorted(each.mean.least for each in rows if each.mean.least is not None):
        count, middle = len(least), statistics.median(least)
        size = printed(middle, "", places(middle, "", middle / 5))
        star = f" ({STAR})" if any(each.mean.significant for each in rows) else ""
        notes += [
            f"Welch's t-test, Holm's correction for {count} comparison{'s' * (count != 1)}{star}",
            f"these seeds show a difference of {size} four times in five (median)",
        ]
    notes += _without(rows)
    beware = ["not all rows have the same cells"] * (len({len(each.means) for each in rows}) > 1)
    beware += _conditions(tables)
    return [first, *("; ".join(line) for line in (notes, beware) if line)]


def _without(rows: Sequence[Overall]) -> list[str]:
    """Why rows have no interval or no test."""
    every = [list(each.parts.values()) for each in rows]
    fewest = min(len(part.gaps) for parts in every for part in parts)
    notes = ["no test for fewer than three seeds of a data set"] if fewest < FEWEST else []
    notes += ["no interval for fewer than two"] if fewest < 2 else []
    if not all(map(overall.weighed, every)):
        notes.append(
            "no interval and no test where a column has no row but the two compared: the deviations have to be of other runs"
        )
    return notes


def _conditions(tables: Sequence[Table]) -> list[str]:
    """What to know of the runs when comparing them, and of which data sets."""
    found: dict[str, list[str]] = {}
    for table in tables:
        for note in [*selection(table), *across(table), *unlike(table)]:
            found.setdefault(note, []).append(table.shared.get("dataset", ""))
    return [
        note if len(data) == len(tables) else f"{note} ({', '.join(dict.fromkeys(data))})"
        for note, data in found.items()
    ]


def _latex(drawn: Grid, labels: Mapping[str, str]) -> str:
    def cell(text: str) -> str:
        return latex.escape(text).replace("*", "$^{*}$")

    def label(text: str) -> str:
        return latex.escape(names.written(text, labels))

    head = [label({"recipe": "Recipe"}.get(text, text)) for text in drawn.head]
    body = [[*map(label, own), *(cell(text) for text, _ in cells)] for own, cells in drawn.lines]
    caption = latex.escape(". ".join(line[:1].upper() + line[1:] for line in drawn.caption))
    return latex.environment([drawn.method], f"{caption}.", "overall", [head, *body], drawn.keys)
