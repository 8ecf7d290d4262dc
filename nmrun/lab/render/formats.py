"""Comparisons written down: Markdown and LaTeX to be read, CSV and JSON for programs; tables as HTML
for pages.

LaTeX needs booktabs, and is as narrow as a column where that is possible.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nmrun.lab.compare import notation, runs
from nmrun.lab.compare.comparison import ALL, Comparison, lines
from nmrun.lab.compare.notation import (
    MINUS,
    Key,
    interval,
    labelled,
    p_value,
    printed,
    short,
    words,
)
from nmrun.lab.compare.overall import Overall, better
from nmrun.lab.compare.statistics import Cell, Difference, cell_value
from nmrun.lab.compare.tables import Table
from nmrun.lab.output import quantity
from nmrun.lab.render import captions, cautions

READABLE = ("markdown", "latex")
METHOD = (
    "The unit of a cell is the median over the other rows of its column, corrected for the bias of so few seeds. "
    "Intervals hold for the units found. Every cell counts alike. Seeds of one data set are observations. A failed seed "
    "counts as the worst other run of its cell. Tests are two-sided."
)
Line = tuple[list[str], list[tuple[str, bool]]]


@dataclass(frozen=True)
class Grid:
    """A table as text: its caption, ``keys`` columns of labels, then cells, each with whether it is
    bold. ``method`` says how the numbers come about.
    """

    caption: list[str]
    keys: int
    head: list[str]
    lines: list[Line]
    method: str = ""


def render(
    comparison: Comparison,
    style: str,
    labels: Mapping[str, str] | None = None,
    method: bool = False,
) -> str:
    """Write a comparison down: its tables, or where it is over all cells, that.

    ``style`` is ``markdown``, ``latex``, ``csv`` or ``json``. Texts are ASCII, but for minus signs
    and the users' own names. ``method``: say in Markdown how the numbers come about.
    """
    if style not in READABLE:
        return runs.as_text(lines(comparison), style)
    if comparison.overall:
        grid = _over_all_cells(comparison)
        return _latex_over_all_cells(grid, labels) if style == "latex" else markdown(grid, method)
    if style == "latex":
        return "\n".join(latex(table, labels) for table in comparison.tables)
    return "\n".join(markdown(grid, method) for table in comparison.tables for grid in grids(table))


def grids(table: Table) -> list[Grid]:
    """The values, and where there is a baseline the differences to it."""
    head = [*table.row_keys, *(words(table.column_keys, column) for column in table.columns)]
    with_units = [*table.row_keys, *(_head(table, column) for column in table.columns)]
    keys, values = len(table.row_keys), [_values(table, *line) for line in table.with_paper]
    if not table.baseline:
        return [Grid(captions.caption(table), keys, with_units, values, captions.method(table))]
    compared = [
        (_labels(table, row, str), [_difference(table, row, column) for column in table.columns])
        for row in table.rows
        if row not in table.baseline
    ]
    return [
        Grid(captions.caption(table), keys, with_units, values),
        Grid(captions.comparison(table), keys, head, compared, captions.method(table)),
    ]


def _labels(table: Table, row: Key, metric: Callable[[str], str]) -> list[str]:
    pairs = zip(table.row_keys, row, strict=True)
    return [metric(label) if key == "metric" else short(label) for key, label in pairs]


def _head(table: Table, column: Key) -> str:
    pairs = zip(table.column_keys, column, strict=True)
    return words(
        table.column_keys, tuple(labelled(text) if key == "metric" else text for key, text in pairs)
    )


def _values(table: Table, row: Key, published: bool) -> Line:
    if published:
        return [*row[:-1], f"{row[-1]} (paper)"], [
            (figure, False) for figure in table.published(row)
        ]
    cells = [(text(table, row, column), (row, column) in table.best) for column in table.columns]
    return _labels(table, row, labelled), cells


def markdown(grid: Grid, method: bool = False) -> str:
    """Aligned for a terminal too; with ``method``, how the numbers come about stands below."""
    lines = [
        [*labels, *(f"**{cell}**" if out else cell for cell, out in cells)]
        for labels, cells in grid.lines
    ]
    below = f"\n{plain(grid.method)}\n" if method and grid.method else ""
    above = "\n".join(map(plain, grid.caption))
    return f"{above}\n\n{aligned(grid.head, lines)}\n{below}"


def html_table(grid: Grid) -> Markup:
    """The caption and a ``table`` element, which scrolls by itself where the page is narrow."""
    return filled("table.html", grid=grid)


def text(table: Table, row: Key, column: Key) -> str:
    """A cell as ``98.7 +- 0.3 (3, 2 failed)``: mean and standard deviation, the number of seeds
    that they are over, and what gave no value. One without runs is ``-``.
    """
    value, spread, cell = _figures(table, row, column)
    if not value:
        return cell.counted() or "-"
    return f"{value} +- {spread} ({cell.counted()})" if spread else f"{value} ({cell.counted()})"


def _figures(table: Table, row: Key, column: Key) -> tuple[str, str, Cell]:
    """A cell's value and standard deviation as they are printed, each empty where there is none."""
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    metric = table.metric_of(row, column)
    value = cell_value(cell, table.statistic, table.higher_is_better(metric))
    if value is None:
        return "", "", cell
    sd = cell.sd if table.statistic == "mean" else None
    decimals = table.digits_of((row, column), value, sd)
    counted = decimals is None and metric.startswith("flops/")  # all runs have the same
    spread = "" if sd is None or counted else printed(sd, metric, decimals)
    return printed(value, metric, decimals), spread, cell


def _difference(table: Table, row: Key, column: Key) -> tuple[str, bool]:
    """``-0.5 [-0.9, -0.1] p=0.012* (5)``: difference, interval, p-value with a star where it is
    significant, number of common seeds. Nothing is bold.
    """
    gap, metric = table.differences.get((row, column)), table.metric_of(row, column)
    if gap is None:
        return "-", False
    return f"{_judged(gap, metric, table.digits)} ({gap.n})", False


def _judged(gap: Difference, metric: str, digits: int | None) -> str:
    star = "*" if gap.significant else ""
    written = interval(gap.mean, gap.low, gap.high, metric, gap.error, digits)
    return f"{written}{p_value(gap.p)}{star}"


# --- over all cells -------------------------------------------------------------------------------


def _over_all_cells(comparison: Comparison) -> Grid:
    rows, tables = comparison.overall, comparison.tables
    keys = tables[0].row_keys
    every = list(dict.fromkeys(data for each in rows for data in each.parts))
    several = len(every) > 1
    fails = any(each.failed for each in rows)
    columns = [*keys, "better in"]
    if fails:
        columns.append("failed")
    columns += ["median cell", *(every if several else [ALL])]
    if several:
        columns += [ALL, "but for one data set"]
    written = []
    for each in rows:
        cells = [f"{better(each.means)} of {len(each.means)}"]
        if fails:
            cells.append(f"{each.failed} of {each.runs}")
        error = max(part.gap.error for part in each.parts.values())
        cells.append(_plain(each.median, error))
        cells += [_part(each, data) for data in every]
        if several:
            ends = sorted((value, data) for data, value in each.all_but.items())
            cells += [
                _plain(each.mean, error),
                " to ".join(
                    f"{_plain(value, error)} ({data})" for value, data in (ends[0], ends[-1])
                )
                if ends
                else "-",
            ]
        written.append(([short(label) for label in each.row], [(cell, False) for cell in cells]))
    above = captions.over_all_cells(rows, tables, several)
    return Grid(above, len(keys), columns, written, METHOD)


def _part(each: Overall, data: str) -> str:
    """``+0.5 [+0.2, +0.8] p=0.01* (4)``: difference, interval, p-value, number of cells."""
    if data not in each.parts:
        return "-"
    part = each.parts[data]
    return f"{_judged(part.gap, '', None)} ({len(part.means)})"


def _plain(value: float, error: float) -> str:
    return interval(value, None, None, "", error)


def _latex_over_all_cells(grid: Grid, aliases: Mapping[str, str] | None) -> str:
    def cell(text: str) -> str:
        return escape(text).replace("*", "$^{*}$")

    def label(text: str) -> str:
        return escape(notation.written(text, aliases))

    head = [label({"recipe": "Recipe"}.get(text, text)) for text in grid.head]
    body = [
        [*map(label, labels), *(cell(text) for text, _ in cells)] for labels, cells in grid.lines
    ]
    caption = escape(". ".join(line[:1].upper() + line[1:] for line in grid.caption))
    return environment([grid.method], f"{caption}.", "overall", [head, *body], grid.keys)


@functools.cache
def _templates() -> jinja2.Environment:
    """Whatever users wrote becomes text."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters["signs"] = lambda text: text.replace("+-", "\N{PLUS-MINUS SIGN}")
    return templates


def filled(template: str, **values: Any) -> Markup:
    """A template with its values, of which texts are escaped and :class:`markupsafe.Markup` is not.
    ASCII, but for what stands in scripts.
    """
    text = _templates().get_template(template).render(**values)
    return Markup(text.replace(MINUS, "&minus;").replace("\N{PLUS-MINUS SIGN}", "&plusmn;"))


def document(template: str, **values: Any) -> str:
    """As :func:`filled`, with all other characters as ASCII too."""
    return filled(template, **values).encode("ascii", "xmlcharrefreplace").decode()


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write the head, a rule and the lines, with aligned columns."""
    cells = [[plain(cell) for cell in line] for line in (head, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]])


def plain(text: str) -> str:
    """A text as it is: no cell, link or HTML element begins in it, and no terminal's command."""
    for special in ("|", "]("):
        text = text.replace(special, f"{special[:-1]}\\{special[-1]}")
    text = re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)  # nothing begins in "p < 0.05"
    return "".join(c if c.isprintable() else " " for c in text)


SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", **{c: f"\\{c}" for c in "_%&#${}"}, MINUS: "$-$",
}  # fmt: skip
COLUMN = 234.0  # points; a column of two in most styles is that wide, or a little more
LETTER, SMALL, BETWEEN = 4.3, 3.4, 6.0  # points, in \footnotesize: a digit, one of the deviation
HEAD = "% needs \\usepackage{booktabs}"


def latex(table: Table, aliases: Mapping[str, str] | None = None) -> str:
    """One ``table`` environment. A cell is the mean, with the standard deviation as its index. Each
    column has one number of digits.

    The number of seeds stands in the caption, and in a cell where it is another one. With a
    baseline a star marks what differs from it. What else is to be known when comparing stands
    above, as a comment.
    """
    table = table.evenly()
    n = _usual(table)
    above, columns = _columns(table, aliases)
    head = [*map(_heading, table.row_keys), *columns]
    comments = captions.caption(table)
    if table.baseline:
        comments += captions.comparison(table)
    if method := captions.method(table):
        comments.append(method)
    rows = [_line(table, *line, n, aliases) for line in table.with_paper]
    keys, rules, caption = len(table.row_keys), len(table.references), _caption(table, n, aliases)
    return environment(comments, caption, _name(table), [head, *rows], keys, rules, above)


def environment(
    comments: Sequence[str],
    caption: str,
    name: str,
    lines: Sequence[Sequence[str]],
    keys: int,
    references: int = 0,
    above: Sequence[str] = (),
) -> str:
    """One ``table`` environment, or ``table*`` where it is too wide for a column of two.

    ``lines`` are the head, then the rows, all cells as LaTeX. The first ``references`` rows have a
    rule below.
    """
    star = "*" if _width(lines) > COLUMN else ""
    return "\n".join(
        [
            HEAD,
            *(f"% {' '.join(text.split())}" for text in comments),
            rf"\begin{{table{star}}}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}\setlength{\belowcaptionskip}{4pt}",
            rf"\caption{{{caption}}}",
            rf"\label{{tab:{name}}}",
            rf"\begin{{tabular}}{{{'l' * keys}{'c' * (len(lines[0]) - keys)}}}",
            r"\toprule",
            *above,
            " & ".join(lines[0]) + r" \\",
            r"\midrule",
            *_body(lines[1:], references),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\end{{table{star}}}",
            "",
        ]
    )


def escape(text: str) -> str:
    """A text as LaTeX prints it."""
    return "".join(SPECIAL.get(c, c) for c in text)


def _line(
    table: Table, row: Key, published: bool, n: int, aliases: Mapping[str, str] | None
) -> list[str]:
    if not published:
        labels = [escape(notation.written(short(label), aliases)) for label in row]
        return [*labels, *(_cell(table, row, column, n) for column in table.columns)]
    labels = [escape(notation.written(label, aliases)) for label in row]
    labels[-1] += " (published)"
    return [*labels, *("--" if text == "-" else _math(text) for text in table.published(row))]


def _body(lines: Sequence[Sequence[str]], references: int) -> list[str]:
    """The rows, with a rule below the references, which come first."""
    rows = [" & ".join(line) + r" \\" for line in lines]
    if 0 < references < len(rows):
        rows.insert(references, r"\midrule")
    return rows


def _cell(table: Table, row: Key, column: Key, n: int) -> str:
    value, spread, cell = _figures(table, row, column)
    if not value:
        return escape(cell.counted()) or "--"
    text = _in_math(value)
    if (row, column) in table.best:
        text = rf"\mathbf{{{text}}}"
    if spread:
        text += rf"_{{\pm {_in_math(spread)}}}"
    gap = table.differences.get((row, column))
    text += "^{*}" if gap is not None and gap.significant else ""
    return f"${text}$" + (f" ({escape(cell.counted())})" if cell.n != n or cell.without else "")


def _in_math(text: str) -> str:
    """What ``printed`` gives, inside of a formula."""
    text = re.sub(r"e([+-]?)0*(\d+)$", r"\\times 10^{\1\2}", text.replace(MINUS, "-"))
    return re.sub(r"([a-zA-Z])$", r"\\mathrm{\1}", text.replace("{+", "{"))


def _math(text: str) -> str:
    """A published figure, in a formula where it is a number."""
    return f"${_in_math(text)}$" if re.fullmatch(r"[-+\u2212]?[\d.]+", text) else escape(text)


def _heading(key: str) -> str:
    return escape({"recipe": "Recipe", "sparsity": "N:M", "metric": "Metric"}.get(key, key))


def _columns(table: Table, aliases: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    """The lines above the head, one for each key of columns but the last, and the head's columns."""
    keys, columns = table.column_keys, table.columns
    flat = [escape(", ".join(notation.column(keys, column, aliases))) for column in columns]
    if len({column[:-1] for column in columns}) == len(columns):
        return [], flat
    above = []
    for level in range(1, len(keys)):
        cells, rules, first = [""] * len(table.row_keys), [], len(table.row_keys) + 1
        for labels, group in itertools.groupby(columns, key=lambda column: column[:level]):
            wide = len(list(group))
            text = escape(*notation.column(keys[level - 1 : level], labels[-1:], aliases))
            cells.append(rf"\multicolumn{{{wide}}}{{c}}{{{text}}}")
            rules.append(rf"\cmidrule(lr){{{first}-{first + wide - 1}}}")
            first += wide
        above += [" & ".join(cells) + r" \\", " ".join(rules)]
    return above, [escape(*notation.column(keys[-1:], column[-1:], aliases)) for column in columns]


def _usual(table: Table) -> int:
    """The number of seeds that most cells have."""
    counts = Counter(cell.n for cell in table.cells.values() if cell.n)
    return counts.most_common(1)[0][0] if counts else 0


def _caption(table: Table, n: int, aliases: Mapping[str, str] | None) -> str:
    several = table.several_metrics
    what = "" if several else notation.metric(table.metric)
    where = captions.title(table, aliases or {})
    first = escape(": ".join(filter(None, [f"{what[:1].upper()}{what[1:]}", where])))
    statistic = {"mean": "mean and standard deviation", "median": "median", "best": "best"}
    notes = [f"{first}; {statistic[table.statistic]} over {quantity(n, 'seed')}"]
    if table.best:
        notes.append(f"{captions.bold(table).capitalize()} in bold")
    if table.baseline:
        gaps = table.differences.values()
        whom = escape(_whom(table, aliases))
        test = "(moderated t-test, Holm's correction, $p < 0.05$)"
        if any(gap.significant for gap in gaps):
            notes.append(f"$^{{*}}$: differs from {whom} {test}")
        elif any(gap.p is not None for gap in gaps):
            notes.append(f"No difference to {whom} is significant {test}")
        else:
            notes.append(f"{captions.untested(gaps).capitalize()}: no test")
    if table.paper:
        notes.append(f"Published: {escape(table.paper_source)}")
    conditions = [*cautions.of_values(table), *cautions.of_differences(table)]
    notes += [escape(note[:1].upper() + note[1:]) for note in conditions]
    return ". ".join(notes) + "."


def _whom(table: Table, aliases: Mapping[str, str] | None) -> str:
    """The baseline, by what tells it from other rows: ``SR-STE of the same optimizer``."""
    labels, same = [], []
    for key, ours, every in zip(
        table.row_keys,
        zip(*table.baseline, strict=True),
        zip(*table.rows, strict=True),
        strict=True,
    ):
        if len(set(ours)) > 1:
            same.append(notation.setting(key))
        elif len(set(every)) > 1:
            labels.append(notation.named(key, notation.written(ours[0], aliases)))
    return ", ".join(labels) + (f" of the same {' and '.join(same)}" if same else "")


def _name(table: Table) -> str:
    """For ``\\ref``: ``digits-small-conv-test-accuracy``."""
    parts = [table.shared.get("dataset"), table.shared.get("model"), table.metric]
    return re.sub(r"[^a-zA-Z0-9]+", "-", " ".join(filter(None, parts))).strip("-").lower()


def _width(lines: Sequence[Sequence[str]]) -> float:
    """About how wide the table is, in points."""

    def points(cell: str) -> float:
        small = "".join(re.findall(r"_\{\\pm (.*?)\}", cell))
        rest = re.sub(r"_\{\\pm .*?\}|\\[a-z]+|[{}$^]", "", cell)
        if not small:
            return LETTER * len(rest)
        return LETTER * len(rest) + SMALL * (len(small) + 2)  # the sign +- is two letters wide

    columns = zip(*lines, strict=True)
    return sum(max(map(points, column)) + BETWEEN for column in columns)
