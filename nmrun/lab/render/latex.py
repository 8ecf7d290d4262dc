"""Comparisons as LaTeX, which needs booktabs. A table is as narrow as a column where that is
possible."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import MINUS, short
from nmrun.lab.compare.tables import ROW_COLUMNS, Table
from nmrun.lab.output import quantity
from nmrun.lab.render import captions, cautions, grids
from nmrun.lab.render.grids import Figure, Grid

SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", **{c: f"\\{c}" for c in "_%&#${}"}, MINUS: "$-$",
}  # fmt: skip
COLUMN = 234.0  # points; a column of two in most styles is that wide, or a little more
LETTER, SMALL, BETWEEN = 4.3, 3.4, 6.0  # points, in \footnotesize: a digit, one of the deviation
NUMBER = re.compile(rf"[-+{MINUS}]?[\d.]+(e[-+{MINUS}]?\d+|[a-zA-Z])?")
HEAD = "% needs \\usepackage{booktabs}"


def table(table: Table) -> str:
    """One ``table`` environment. A cell is the mean, with the standard deviation as its index. Each
    column has one number of digits.

    The number of seeds stands in the caption, and in a cell where it is another one. With a
    baseline a star marks what differs from it. What else is to be known when comparing stands
    above, as a comment.
    """
    table = table.evenly()
    n = _usual(table)
    keys = table.column_keys
    columns = [escape(", ".join(notation.column(keys, column))) for column in table.columns]
    head = [*map(_heading, table.row_keys), *columns, *map(escape, ROW_COLUMNS)]
    comments = captions.caption(table)
    if table.baseline:
        comments += captions.comparison(table)

    def name(key: str, label: str) -> str:
        return escape(notation.written(short(label)))

    rows = [
        [*labels, *(_cell(figure, n) for figure in figures)]
        for labels, figures in grids.lines(table, name, "published")
    ]
    labels, rules = len(table.row_keys), len(table.references)
    return environment(comments, _caption(table, n), _name(table), [head, *rows], labels, rules)


def over_all_cells(grid: Grid) -> str:
    def cell(text: str) -> str:
        return escape(text).replace("*", "$^{*}$")

    def label(text: str) -> str:
        return escape(notation.written(text))

    head = [label({"recipe": "Recipe"}.get(text, text)) for text in grid.head]
    body = [
        [*map(label, labels), *(cell(figure.text) for figure in figures)]
        for labels, figures in grid.lines
    ]
    caption = escape(". ".join(line[:1].upper() + line[1:] for line in grid.caption))
    return environment([], f"{caption}.", "overall", [head, *body], grid.keys)


def environment(
    comments: Sequence[str],
    caption: str,
    name: str,
    lines: Sequence[Sequence[str]],
    keys: int,
    references: int = 0,
) -> str:
    """One ``table`` environment, or ``table*`` where it is too wide for a column of two.

    ``lines`` are the head, then the rows, all cells as LaTeX. The first ``references`` rows have a
    rule below.
    """
    star = "*" if _width(lines) > COLUMN else ""
    head, *rows = (" & ".join(line) + r" \\" for line in lines)
    if 0 < references < len(rows):
        rows.insert(references, r"\midrule")
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
            head,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\end{{table{star}}}",
            "",
        ]
    )


def escape(text: str) -> str:
    """A text as LaTeX prints it."""
    return "".join(SPECIAL.get(c, c) for c in text)


def _cell(figure: Figure, n: int) -> str:
    """A figure, in a formula where it is a number; with its seeds where they are not ``n``."""
    if not NUMBER.fullmatch(figure.value):
        return "--" if figure.value == "-" else escape(figure.value)
    text = _in_math(figure.value)
    if figure.bold:
        text = rf"\mathbf{{{text}}}"
    if figure.spread:
        text += rf"_{{\pm {_in_math(figure.spread)}}}"
    if figure.star:
        text += "^{*}"
    counted = f" ({escape(figure.counted)})" if figure.counted not in ("", str(n)) else ""
    return f"${text}${counted}"


def _in_math(text: str) -> str:
    """What ``printed`` gives, inside of a formula."""
    text = re.sub(r"e([+-]?)0*(\d+)$", r"\\times 10^{\1\2}", text.replace(MINUS, "-"))
    return re.sub(r"([a-zA-Z])$", r"\\mathrm{\1}", text.replace("{+", "{"))


def _heading(key: str) -> str:
    return escape({"recipe": "Recipe", "sparsity": "N:M", "metric": "Metric"}.get(key, key))


def _usual(table: Table) -> int:
    """The number of seeds that most cells have."""
    counts = Counter(cell.n for cell in table.cells.values() if cell.n)
    return counts.most_common(1)[0][0] if counts else 0


def _caption(table: Table, n: int) -> str:
    several = table.several_metrics
    what = "" if several else notation.metric(table.metric)
    where = captions.title(table, in_papers=True)
    first = escape(": ".join(filter(None, [f"{what[:1].upper()}{what[1:]}", where])))
    notes = [f"{first}; mean and standard deviation over {quantity(n, 'seed')}"]
    if table.best:
        notes.append(f"{captions.bold(table).capitalize()} in bold")
    if table.baseline:
        gaps = table.differences.values()
        whom = escape(_whom(table))
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


def _whom(table: Table) -> str:
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
            labels.append(notation.named(key, notation.written(ours[0])))
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
