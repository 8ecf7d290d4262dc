"""Tables as Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence

from nmrun.report.statistics import Cell
from nmrun.report.tables import Key, Table, printed, significant

SPLITS = {"test": "on the test split", "eval": "on the validation split"}
LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", **{c: f"\\{c}" for c in "_%&#${}"},
}  # fmt: skip


def render(tables: Sequence[Table], style: str) -> str:
    """``markdown``, ``latex``, ``csv`` (long: one line a cell, full precision) or ``html`` (one page); ASCII, but for the users' own names."""
    if style == "csv":
        return as_csv(tables)
    if style == "html":
        return as_html(tables)
    return "\n".join((latex if style == "latex" else markdown)(table) for table in tables)


def markdown(table: Table) -> str:
    """Aligned for a terminal too; the best of a column is bold."""
    lines = [[*table.row_keys, *(" ".join(column) for column in table.columns)]]
    for row in table.rows:
        shown = [(text(table, row, column), (row, column) in table.best) for column in table.columns]
        lines.append([*row, *(f"**{value}**" if best else value for value, best in shown)])
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    padded = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([caption(table), "", padded[0], rule, *padded[1:]]) + "\n"


def latex(table: Table) -> str:
    """A ``table`` environment; needs the package booktabs."""

    def escape(value: str) -> str:
        return "".join(LATEX.get(c, c) for c in value.replace("+-", "\0")).replace("\0", r"$\pm$")

    head = [*table.row_keys, *(" ".join(column) for column in table.columns)]
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escape(caption(table))}}}"]
    lines += [rf"\begin{{tabular}}{{{'l' * len(table.row_keys)}{'r' * len(table.columns)}}}", r"\toprule"]
    lines += [" & ".join(map(escape, head)) + r" \\", r"\midrule"]
    for row in table.rows:
        shown = [(escape(text(table, row, column)), (row, column) in table.best) for column in table.columns]
        cells = [rf"\textbf{{{value}}}" if best else value for value, best in shown]
        lines.append(" & ".join([*map(escape, row), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def as_csv(tables: Sequence[Table]) -> str:
    """Columns: what tells the tables apart, the keys of row and column, metric, mean, sd, n, best (0 or 1), without (runs that gave no value).

    A dense reference is one line, not one for each ratio. Empty: undefined.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    groups = [key for key in ("dataset", "model") if key not in (*tables[0].row_keys, *tables[0].column_keys)]
    keys = [*groups, *tables[0].row_keys, *tables[0].column_keys]
    writer.writerow([*keys, "metric", "mean", "sd", "n", "best", "without"])
    for table in tables:
        group = [table.shared[key] for key in groups]
        for row in table.rows:
            for column in table.columns[:1] if row in table.references else table.columns:
                cell = table.cells.get((row, column))
                if cell is not None:
                    ratio: Key = ("dense",) if row in table.references else column
                    best, without = int((row, column) in table.best), sum(cell.without.values())
                    writer.writerow([*group, *row, *ratio, table.metric, cell.mean, cell.sd, cell.n, best, without])
    return out.getvalue()


def as_html(tables: Sequence[Table]) -> str:
    """One page with all tables."""
    style = (
        "body{font:15px sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}"
        "caption{text-align:left;padding-bottom:.6em}th,td{padding:.3em .9em;text-align:right;white-space:nowrap}"
        "tbody th,th.key{text-align:left}thead th{border-bottom:1px solid}tbody th{font-weight:normal}"
    )
    parts = []
    for table in tables:
        head = "".join(f'<th class="key">{html.escape(key)}</th>' for key in table.row_keys)
        head += "".join(f"<th>{html.escape(' '.join(column))}</th>" for column in table.columns)
        body = ""
        for row in table.rows:
            body += "<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in row)
            for column in table.columns:
                shown = html.escape(text(table, row, column)).replace("+-", "&plusmn;")
                body += f"<td><b>{shown}</b></td>" if (row, column) in table.best else f"<td>{shown}</td>"
            body += "</tr>\n"
        said = html.escape(caption(table)).replace("+-", "&plusmn;")
        parts.append(f"<table><caption>{said}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n")
    title = html.escape(f"nmrun: {tables[0].metric}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>\n'
        f"<body>\n{''.join(parts)}</body></html>\n"
    )


def text(table: Table, row: Key, column: Key) -> str:
    """``98.7 +- 0.3 (3)``: mean, standard deviation, number of runs; then what gave no value, as ``failed (1)``."""
    cell = table.cells.get((row, column), Cell(None, None, 0, {}))
    parts = []
    if cell.mean is not None:
        spread = "" if cell.sd is None else f" +- {deviation(cell.sd, table.metric)}"
        parts.append(f"{printed(cell.mean, table.metric)}{spread} ({cell.n})")
    parts += [f"{reason} ({count})" for reason, count in cell.without.items()]
    return ", ".join(parts) or "-"


def deviation(sd: float, metric: str) -> str:
    """In the unit of ``printed``."""
    return printed(sd, metric) if "accuracy" in metric else significant(sd, 2)


def title(table: Table) -> str:
    """What all runs of the table have in common, in short."""
    has = table.shared
    where = " on ".join(has[key] for key in ("model", "dataset") if key in has)
    optimizer = " lr ".join(has[key] for key in ("optimizer", "optimizer.lr") if key in has) if "optimizer" in has else ""
    epochs = f"{has['trainer.epochs']} epochs" if "trainer.epochs" in has else ""
    return ", ".join(filter(None, [where, optimizer, epochs]))


def caption(table: Table) -> str:
    """What the numbers are, and what to know when comparing them."""
    unit = " in %" if "accuracy" in table.metric else ""
    split, slash, name = table.metric.removeprefix("best/").partition("/")
    weights = "the best weights by validation" if table.metric.startswith("best/") else "the last weights"
    what = f"{name} {SPLITS.get(split, f'({split})')}{unit}, {weights}" if slash else f"{split}{unit}"
    notes = [f"{title(table)}: {what}; mean +- standard deviation over seeds (number of runs)"]
    if table.references and len(table.columns) > 1:
        notes.append("dense has no ratio and stands in every column")
    if table.best:
        notes.append("best of each column in bold")
    if table.differing:
        notes.append(f"not the same in all cells: {', '.join(table.differing)}")
    return "; ".join(notes)
