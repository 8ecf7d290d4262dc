"""A table for a paper: LaTeX with booktabs, as narrow as a column where that is possible."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from nmrun.lab.compare import names
from nmrun.lab.compare.names import Key, short
from nmrun.lab.compare.numbers import MINUS, printed
from nmrun.lab.compare.statistics import Cell, shown
from nmrun.lab.compare.tables import Table
from nmrun.lab.show import captions
from nmrun.lab.words.metric import higher_is_better

SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", **{c: f"\\{c}" for c in "_%&#${}"}, MINUS: "$-$",
}  # fmt: skip
COLUMN = 234.0  # points; a column of two in most styles is that wide, or a little more
LETTER, SMALL, BETWEEN = 4.3, 3.4, 6.0  # points, in \footnotesize: a digit, one of the deviation
HEAD = "% needs \\usepackage{booktabs}"


def latex(table: Table, aliases: Mapping[str, str] | None = None) -> str:
    """One ``table`` environment, or ``table*`` where it is too wide for a column of two.

    A cell is the mean, with the standard deviation as its index. The number of seeds stands in the
    caption, and in a cell where it is another one. With a baseline a star marks what differs from
    it; the differences themselves are in the other formats. What else is to be known when
    comparing stands above, as a comment.
    """
    n = _usual(table)
    above, columns = _columns(table, aliases)
    head = [*map(_heading, table.row_keys), *columns]
    comments = captions.caption(table)
    comments += [*captions.comparison(table)] if table.baseline else []
    comments += filter(None, [captions.method(table)])
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
    """Write one ``table`` environment, or ``table*`` where it is too wide for a column of two.

    Args:
        name: for ``\\ref``.
        lines: the head, then the rows; all cells as LaTeX.
        references: so many rows at the beginning have a rule below.
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
            *_ruled(lines[1:], references),
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
        labels = [escape(names.written(short(label), aliases)) for label in row]
        return [*labels, *(_cell(table, row, column, n) for column in table.columns)]
    labels = [escape(names.written(label, aliases)) for label in row]
    labels[-1] += " (published)"
    return [*labels, *("--" if text == "-" else _math(text) for text in table.published(row))]


def _ruled(lines: Sequence[Sequence[str]], references: int) -> list[str]:
    """The rows, with a rule below the references, which come first."""
    rows = [" & ".join(line) + r" \\" for line in lines]
    if 0 < references < len(rows):
        rows.insert(references, r"\midrule")
    return rows


def _cell(table: Table, row: Key, column: Key, n: int) -> str:
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    metric = table.metric_of(row, column)
    value = shown(cell, table.statistic, higher_is_better(metric))
    if value is None:
        return escape(cell.counted()) or "--"
    spread = cell.sd if table.statistic == "mean" else None
    at = table.digits_of(value, metric, spread)
    text = _number(printed(value, metric, at))
    if (row, column) in table.best:
        text = rf"\mathbf{{{text}}}"
    if spread is not None and not metric.startswith("flops/"):
        text += rf"_{{\pm {_number(printed(spread, metric, at))}}}"
    gap = table.differences.get((row, column))
    text += "^{*}" if gap is not None and gap.significant else ""
    return f"${text}$" + (f" ({escape(cell.counted())})" if cell.n != n or cell.without else "")


def _number(text: str) -> str:
    """What ``printed`` gives, inside of a formula."""
    text = re.sub(r"e([+-]?)0*(\d+)$", r"\\times 10^{\1\2}", text.replace(MINUS, "-"))
    return re.sub(r"([a-zA-Z])$", r"\\mathrm{\1}", text.replace("{+", "{"))


def _math(text: str) -> str:
    """A published figure, in a formula where it is a number."""
    return f"${_number(text)}$" if re.fullmatch(r"[-+\u2212]?[\d.]+", text) else escape(text)


def _heading(key: str) -> str:
    return escape({"recipe": "Recipe", "sparsity": "N:M", "metric": "Metric"}.get(key, key))


def _columns(table: Table, aliases: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    """The lines above the head, one for each key of columns but the last, and the head's columns.
    There are none above where they would join no columns.
    """
    keys, columns = table.column_keys, table.columns
    flat = [escape(", ".join(names.column(keys, column, aliases))) for column in columns]
    if len({column[:-1] for column in columns}) == len(columns):
        return [], flat
    above = []
    for level in range(1, len(keys)):
        cells, rules, first = [""] * len(table.row_keys), [], len(table.row_keys) + 1
        for labels, group in itertools.groupby(columns, key=lambda column: column[:level]):
            wide = len(list(group))
            text = escape(*names.column(keys[level - 1 : level], labels[-1:], aliases))
            cells.append(rf"\multicolumn{{{wide}}}{{c}}{{{text}}}")
            rules.append(rf"\cmidrule(lr){{{first}-{first + wide - 1}}}")
            first += wide
        above += [" & ".join(cells) + r" \\", " ".join(rules)]
    return above, [escape(*names.column(keys[-1:], column[-1:], aliases)) for column in columns]


def _usual(table: Table) -> int:
    """The number of seeds that most cells have."""
    counts = Counter(cell.n for cell in table.cells.values() if cell.n)
    return counts.most_common(1)[0][0] if counts else 0


def _caption(table: Table, n: int, aliases: Mapping[str, str] | None) -> str:
    several = table.several_metrics
    what = "" if several else names.metric(table.metric)
    where = captions.title(table, aliases or {})
    first = escape(": ".join(filter(None, [f"{what[:1].upper()}{what[1:]}", where])))
    statistic = {"mean": "mean and standard deviation", "median": "median", "best": "best"}
    notes = [f"{first}; {statistic[table.statistic]} over {n} seed{'s' * (n != 1)}"]
    notes += [captions.bold(table).capitalize() + " in bold"] if table.best else []
    if table.baseline:
        gaps = table.differences.values()
        whom = escape(", ".join({names.written(row[0], aliases) for row in table.baseline}))
        test = f"({captions.TESTS[table.test]}, Holm's correction, $p < 0.05$)"
        if any(gap.significant for gap in gaps):
            notes.append(f"$^{{*}}$: differs from {whom} {test}")
        elif any(gap.p is not None for gap in gaps):
            notes.append(f"No difference to {whom} is significant {test}")
        else:
            notes.append("Fewer than three seeds: no test")
    notes += [f"Published: {escape(table.paper_source)}"] if table.paper else []
    conditions = [*captions.selection(table), *captions.across(table), *captions.unlike(table)]
    notes += [escape(note[:1].upper() + note[1:]) for note in conditions]
    return ". ".join(notes) + "."


def _name(table: Table) -> str:
    """For ``\\ref``: ``digits-small-conv-test-accuracy``."""
    parts = [table.shared.get("dataset"), table.shared.get("model"), table.metric]
    return re.sub(r"[^a-zA-Z0-9]+", "-", " ".join(filter(None, parts))).strip("-").lower()


def _width(lines: Sequence[Sequence[str]]) -> float:
    """About how wide the table is, in points."""

    def points(cell: str) -> float:
        small = "".join(re.findall(r"_\{\\pm (.*?)\}", cell))
        rest = re.sub(r"_\{\\pm .*?\}|\\[a-z]+|[{}$^]", "", cell)
        return LETTER * len(rest) + SMALL * (len(small) + 2 * bool(small))

    columns = zip(*lines, strict=True)
    return sum(max(map(points, column)) + BETWEEN for column in columns)
