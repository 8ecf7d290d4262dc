"""Comparisons written down: Markdown and LaTeX to be read, CSV and JSON for programs; and what a
paper needs besides, whom to cite and how a table was made."""

from __future__ import annotations

import hashlib
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nmrun.lab.compare import notation, runs
from nmrun.lab.compare.comparison import ALL, Comparison, lines
from nmrun.lab.compare.differences import Overall, better
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
from nmrun.lab.compare.statistics import Cell, Difference
from nmrun.lab.compare.tables import ROW_COLUMNS, Table
from nmrun.lab.output import quantity
from nmrun.lab.render import captions

REFERENCES = Path(__file__).with_name("references.bib")
OF = re.compile(r"  of = \{(.*)\},\n")
DIGITS = 16  # of a checksum
SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", **{c: f"\\{c}" for c in "_%&#${}"}, MINUS: "$-$",
}  # fmt: skip
MOST = 7  # columns of a table in one of the page's two; one of labels counts twice
NUMBER = re.compile(rf"[-+{MINUS}]?[\d.]+(e[-+{MINUS}]?\d+|[a-zA-Z])?")


def render(comparison: Comparison, style: str) -> str:
    """Write a comparison down: its tables, or where it is over all cells, that.

    ``style`` is ``markdown``, ``latex``, ``csv`` or ``json``. Texts are ASCII, but for minus signs
    and the users' own names.
    """
    if style in ("csv", "json"):
        return runs.as_text(lines(comparison), style)
    in_latex = style == "latex"
    if comparison.overall:
        grid = over_all_cells(comparison, in_papers=in_latex)
        name = _name(comparison.tables[0], "overall", *comparison.data_sets)
        return latex(grid, name) if in_latex else markdown(grid)
    if in_latex:
        return "\n".join(map(_in_latex, comparison.tables))
    return "\n".join(markdown(grid) for table in comparison.tables for grid in grids(table))


# --- what is read ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """What a cell of a table shows, as printed: a value, its standard deviation, and the number of
    seeds or cells that these are over. ``star``: it differs from the baseline; the table of
    differences says so in Markdown."""

    value: str
    spread: str = ""
    counted: str = ""
    bold: bool = False
    star: bool = False

    def text(self, usual: str) -> str:
        """``98.7 +- 0.3 (3, 2 failed)``, without a number that is the ``usual`` one."""
        spread = f" +- {self.spread}" if self.spread else ""
        return f"{self.value}{spread}{self.number(usual)}"

    def number(self, usual: str) -> str:
        return f" ({self.counted})" if self.counted not in ("", usual) else ""


Line = tuple[list[str], list[Figure]]


@dataclass(frozen=True)
class Grid:
    """A table to be read: its caption, ``keys`` columns of labels, then cells. The first
    ``references`` lines are dense training, 0 where dense lines stand elsewhere too. The caption
    tells the ``usual`` number of seeds."""

    caption: list[str]
    keys: int
    head: list[str]
    lines: list[Line]
    references: int = 0
    usual: str = ""


def grids(table: Table) -> list[Grid]:
    """The values, and where there is a baseline the differences to it."""
    shown = [values(table)]
    if table.baseline:
        head = [*table.row_keys, *(words(table.column_keys, column) for column in table.columns)]
        compared = [
            (list(map(short, row)), [_difference(table, row, column) for column in table.columns])
            for row in table.rows
            if row not in table.baseline
        ]
        n, number = captions.seeds([gap.n for gap in table.differences.values()])
        caption = captions.comparison(table, number)
        shown.append(Grid(caption, len(table.row_keys), head, compared, usual=str(n)))
    return shown


def values(table: Table, in_papers: bool = False) -> Grid:
    """The values of a table; published figures stand below the rows of their names."""
    head = [*(_key(key, in_papers) for key in table.row_keys)]
    for column in table.columns:
        pairs = [*zip(table.column_keys, column, strict=True)]
        shown = tuple(labelled(text) if key == "metric" else text for key, text in pairs)
        names = notation.column(table.column_keys, column)
        head.append(", ".join(names) if in_papers else words(table.column_keys, shown))

    def named(row: Key) -> list[str]:
        return [_label(key, t, in_papers) for key, t in zip(table.row_keys, row, strict=True)]

    def published(name: str) -> Line:
        *labels, last = named(tuple(name.split()))
        texts = [table.paper[name].get(" ".join(column), "-") for column in table.columns]
        return [*labels, f"{last} (paper)"], [
            Figure(t) for t in [*texts, *("-" for _ in ROW_COLUMNS)]
        ]

    every: list[Line] = []
    missing = dict.fromkeys(table.paper)
    for row in table.rows:
        figures = [_figure(table, row, column) for column in table.columns]
        beside = [Figure(str(of(table, row))) for of in ROW_COLUMNS.values()]
        every.append((named(row), figures + beside))
        if (name := " ".join(row)) in missing:
            del missing[name]
            every.append(published(name))
    every += map(published, missing)
    first = table.rows[: len(table.references)]
    papers = sum(" ".join(row) in table.paper for row in first)
    references = len(first) + papers if {*first} == table.references else 0
    n, number = captions.seeds([cell.n for cell in table.cells.values() if cell.n])
    caption = captions.caption(table, number, in_papers)
    head += ROW_COLUMNS
    return Grid(caption, len(table.row_keys), head, every, references, str(n))


def _key(key: str, in_papers: bool) -> str:
    papers = {"recipe": "Recipe", "sparsity": "N:M", "metric": "Metric"}
    return papers.get(key, key) if in_papers else key


def _label(key: str, label: str, in_papers: bool) -> str:
    if key == "metric":
        return notation.metric(label) if in_papers else labelled(label)
    return notation.written(short(label)) if in_papers else short(label)


def _figure(table: Table, row: Key, column: Key) -> Figure:
    """Mean and standard deviation, the number of seeds that they are over, and what gave no value.
    One without runs is ``-``."""
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    if cell.mean is None:
        return Figure(cell.counted() or "-")
    metric, gap = table.metric_of(row, column), table.differences.get((row, column))
    decimals = table.digits(row, column)
    counted = metric.startswith("flops/") and decimals is None  # all runs have the same
    return Figure(
        printed(cell.mean, metric, decimals),
        spread="" if cell.sd is None or counted else printed(cell.sd, metric, decimals),
        counted=cell.counted(),
        bold=(row, column) in table.best,
        star=gap is not None and gap.significant,
    )


def _difference(table: Table, row: Key, column: Key) -> Figure:
    gap = table.differences.get((row, column))
    return Figure("-") if gap is None else _judged(gap, table.metric_of(row, column), gap.n)


def _judged(gap: Difference, metric: str, count: int) -> Figure:
    """``-0.5 [-0.9, -0.1] p=0.012* (5)``: difference, interval, p-value with a star where it is
    significant, and over how many seeds or cells."""
    written = interval(gap.mean, gap.low, gap.high, metric, gap.error)
    return Figure(f"{written}{p_value(gap.p)}{'*' if gap.significant else ''}", counted=str(count))


def over_all_cells(comparison: Comparison, in_papers: bool = False) -> Grid:
    """A row's differences to the baseline: of each data set, and over all of them."""
    keys = comparison.tables[0].row_keys
    data_sets = comparison.data_sets
    several = len(data_sets) > 1
    failed = any(each.failed for each in comparison.overall)
    written = {data: notation.written(data) if in_papers else data for data in data_sets}

    def figures(each: Overall) -> dict[str, Figure]:
        error = max(part.gap.error for part in each.parts.values())

        def mean(value: float) -> str:
            return interval(value, None, None, "", error)

        shown = {"better in": Figure(f"{better(each.means)} of {len(each.means)}")}
        if failed:
            shown["failed"] = Figure(f"{each.failed} of {each.runs}")
        shown["median cell"] = Figure(mean(statistics.median(each.means)))
        for data in data_sets:
            part = each.parts.get(data)
            figure = _judged(part.gap, "", len(part.means)) if part else Figure("-")
            shown[written[data] if several else ALL] = figure
        if several:
            shown[ALL] = Figure(mean(each.mean))
        if len(data_sets) > 2:  # of two, the mean without one is the other's column
            # the least and the largest mean over all data sets but one
            ends = sorted((value, data) for data, value in each.all_but.items())
            texts = [f"{mean(value)} ({written[data]})" for value, data in ends[:1] + ends[-1:]]
            shown["but for one data set"] = Figure(" to ".join(texts) or "-")
        return shown

    every = [figures(each) for each in comparison.overall]
    rows = [
        ([_label(*pair, in_papers) for pair in zip(keys, each.row, strict=True)], [*row.values()])
        for each, row in zip(comparison.overall, every, strict=True)
    ]
    head = [*(_key(key, in_papers) for key in keys), *every[0]]
    return Grid(captions.over_all_cells(comparison), len(keys), head, rows)


# --- Markdown -------------------------------------------------------------------------------------


def markdown(grid: Grid) -> str:
    """Aligned for a terminal too."""
    lines = [
        [*labels, *(_marked(figure, grid.usual) for figure in figures)]
        for labels, figures in grid.lines
    ]
    above = "\n".join(map(plain, grid.caption))
    return f"{above}\n\n{aligned(grid.head, lines)}\n"


def _marked(figure: Figure, usual: str) -> str:
    text = figure.text(usual)
    return f"**{text}**" if figure.bold else text


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


# --- LaTeX ----------------------------------------------------------------------------------------


def _in_latex(table: Table) -> str:
    """With a baseline a star marks what differs from it."""
    grid = values(table, in_papers=True)
    if table.baseline:
        whom = (" ".join(notation.column(table.row_keys, row)) for row in table.baseline)
        grid.caption.append(f"compared with {', '.join(whom)}: {captions.tests(table)}")
    of = table.shared.get("dataset", ""), table.shared.get("model", "")
    return latex(grid, _name(table, *of, table.metric), MOST)


def _name(table: Table, *parts: str) -> str:
    """What a label of LaTeX says of a table: also of its rows, where these are no recipes alone."""
    rows = () if table.row_keys == ("recipe",) else table.row_keys
    return re.sub(r"[^a-zA-Z0-9]+", "-", " ".join([*parts, *rows])).strip("-").lower()


def latex(grid: Grid, name: str, most: int = 0) -> str:
    """One ``table`` environment, or of more than ``most`` columns ``table*``, which is as wide as the
    page; it needs booktabs."""
    rows = [
        " & ".join([*map(escape, labels), *(_cell(figure, grid.usual) for figure in figures)])
        for labels, figures in grid.lines
    ]
    if 0 < grid.references < len(rows):
        rows[grid.references] = f"\\midrule\n{rows[grid.references]}"
    first, *rest = grid.caption  # with names as they are written
    caption = ". ".join([first, *(text[:1].upper() + text[1:] for text in rest)])
    caption = escape(caption).replace("+-", r"$\pm$").replace("(*:", "($^{*}$:")
    star = "*" if len(grid.head) + grid.keys > most else ""
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            rf"\begin{{table{star}}}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}\setlength{\belowcaptionskip}{4pt}",
            rf"\caption{{{caption}.}}",
            rf"\label{{tab:{name}}}",
            rf"\begin{{tabular}}{{{'l' * grid.keys}{'c' * (len(grid.head) - grid.keys)}}}",
            r"\toprule",
            " & ".join(map(escape, grid.head)) + r" \\",
            r"\midrule",
            *(rf"{row} \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\end{{table{star}}}",
            "",
        ]
    )


def escape(text: str) -> str:
    """A text on one line: empty lines end a caption."""
    return "".join(SPECIAL.get(character, character) for character in re.sub(r"\s+", " ", text))


def _cell(figure: Figure, usual: str) -> str:
    """``$98.7_{\\pm 0.3}^{*}$``, and the number of seeds where it is not the ``usual`` one."""
    counted = escape(figure.number(usual))
    if not NUMBER.fullmatch(figure.value):
        text = "--" if figure.value == "-" else escape(figure.value).replace("*", "$^{*}$")
        return text + counted
    text = _in_math(figure.value)
    if figure.bold:
        text = rf"\mathbf{{{text}}}"
    if figure.spread:
        text += rf"_{{\pm {_in_math(figure.spread)}}}"
    if figure.star:
        text += "^{*}"
    return f"${text}${counted}"


def _in_math(text: str) -> str:
    """What ``printed`` gives, inside of a formula."""
    text = re.sub(r"e([+-]?)0*(\d+)$", r"\\times 10^{\1\2}", text.replace(MINUS, "-"))
    return re.sub(r"([a-zA-Z])$", r"\\mathrm{\1}", text.replace("{+", "{"))


# --- for a paper ----------------------------------------------------------------------------------


def bibtex(tables: Sequence[Table]) -> str:
    """The entries of nmrun and of the recipes, data sets, metrics and tests of some tables. A line
    names the recipes and data sets that have none."""
    recipes, data = (
        {str(name) for table in tables for name in table.runs[key]} for key in ("recipe", "dataset")
    )
    metrics = {metric for table in tables for metric in table.metric.split(",")}
    tests = {"baseline"} if any(table.baseline for table in tables) else set()
    used = {"nmrun"} | recipes | data | {name.rpartition("/")[2] for name in metrics} | tests
    entries, known = [], {"dense"}
    for entry in REFERENCES.read_text(encoding="utf-8").split("\n\n")[1:]:
        (names,) = OF.findall(entry)
        known |= {*names.split(", ")}
        if used & {*names.split(", ")}:
            entries.append(OF.sub("", entry).strip() + "\n")
    if without := sorted((recipes | data) - known):
        entries.append(f"% no entry here for {', '.join(without)}\n")
    return "\n".join(entries)


def provenance(command: str, tables: Sequence[Table]) -> str:
    """Comments in LaTeX: the command of some tables, the version of nmrun, and a checksum of the
    runs, which is of the id and the value of each, in the order of the ids."""
    lines = [
        f"{run.get('id')} {metric} {run.get(metric)!r}"
        for table in tables
        for metric in table.metric.split(",")
        for run in table.records
    ]
    checksum = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:DIGITS]
    count = quantity(sum(len(table.runs) for table in tables), "run")
    version = sys.modules["nmrun"].__version__  # an import would point upwards
    made = f"nmrun {version}, {count} with the checksum {checksum}"
    return f"% {' '.join(command.split())}\n% {made}\n"
