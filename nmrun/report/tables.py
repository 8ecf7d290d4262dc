"""The comparison table: mean +- standard deviation over seeds, one row a recipe, one column a ratio."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nmrun.errors import ConfigError
from nmrun.report.statistics import Cell, higher_is_better, summarise

RECIPE_ORDER = ("dense", "asp", "ste", "sr_ste", "step", "s_ste")
# Keys that may differ inside one cell: they do not change the result, or are what the cell averages over.
NOT_A_DIFFERENCE = {
    "seed", "status", "id", "folder", "seconds", "commit", "output_dir", "force", "resume", "dry",
    "trainer.device", "trainer.log_every", "trainer.checkpoint_every", "trainer.threads",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows and columns by their labels, cells by (row, column); ``title`` names what all runs share."""

    title: str
    metric: str
    row_name: str
    column_name: str
    rows: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], Cell]
    best: set[tuple[str, str]]
    dense: Cell | None


def build(runs: pd.DataFrame, metric: str, rows: Sequence[str], columns: Sequence[str]) -> Table:
    """Fold runs of one data set and model into a table.

    Raises ConfigError where a cell would average over runs that differ in more than their seed, naming the keys.
    """
    runs = runs.copy()
    runs["_row"] = runs[list(rows)].astype(str).agg(" ".join, axis=1)
    runs["_column"] = runs[list(columns)].astype(str).agg(" ".join, axis=1)
    spread = columns == ["sparsity"] or list(columns) == ["sparsity"]
    is_reference = (runs["sparsity"] == "dense") if spread else pd.Series(False, index=runs.index)
    _refuse_mixed(runs, [*rows, *columns])
    cells = {key: _cell(group, metric) for key, group in runs.groupby(["_row", "_column"], sort=False)}
    dense = _cell(runs[is_reference], metric) if is_reference.any() else None
    shown = runs[~is_reference] if (~is_reference).any() else runs
    column_labels = sorted(shown["_column"].unique(), key=_column_key)
    row_labels = sorted(runs["_row"].unique(), key=_row_key)
    if dense is not None and (~is_reference).any():
        for label in runs[is_reference]["_row"].unique():
            cells |= {(label, column): dense for column in column_labels}
    first = runs.iloc[0]
    title = f"{first['model']} on {first['dataset']}, {first['optimizer']} lr {first['optimizer.lr']:g}, {first['trainer.epochs']} epochs"
    reference_rows = set(runs[is_reference]["_row"])
    table = Table(title, metric, " ".join(rows), " ".join(columns), row_labels, column_labels, cells, set(), dense)
    for column in column_labels:
        table.best.update(_best(table, [r for r in row_labels if r not in reference_rows], column))
    return table


def _cell(group: pd.DataFrame, metric: str) -> Cell:
    finished = group[group["status"] == "finished"]
    return summarise(finished[metric].dropna().tolist() if metric in finished else [], group["status"].tolist())


def _refuse_mixed(runs: pd.DataFrame, spread: Sequence[str]) -> None:
    keys = [k for k in runs.columns if "/" not in k and not k.startswith(("_", "track.")) and k not in NOT_A_DIFFERENCE]
    for (row, column), group in runs.groupby(["_row", "_column"]):
        differing = [k for k in keys if k not in spread and group[k].astype(str).nunique() > 1]
        if differing:
            raise ConfigError(
                f"the cell {row}, {column} would average over runs that differ in {', '.join(differing)}: add it to --rows or --cols, "
                f"or choose with --filter {differing[0]}={group[differing[0]].iloc[0]}"
            )


def _best(table: Table, rows: Sequence[str], column: str) -> set[tuple[str, str]]:
    printed = {}
    for row in rows:
        cell = table.cells.get((row, column))
        if cell is not None and cell.mean is not None:
            printed[row] = float(number(cell.mean, table.metric))  # ties at the printed precision are all marked
    if len(rows) < 2 or not printed:
        return set()
    top = (max if higher_is_better(table.metric) else min)(printed.values())
    return {(row, column) for row, value in printed.items() if value == top}


def _row_key(label: str) -> tuple[int, str]:
    first = label.split(" ")[0]
    return (RECIPE_ORDER.index(first) if first in RECIPE_ORDER else len(RECIPE_ORDER), label)


def _column_key(label: str) -> tuple[Any, ...]:
    n, colon, m = label.split(" ")[0].partition(":")
    if colon and n.isdigit() and m.isdigit():
        return (0, -int(n) / int(m), int(m), label)  # densest first
    try:
        return (1, float(label), 0, label)
    except ValueError:
        return (2, 0.0, 0, label)


def number(value: float, metric: str, sd: bool = False) -> str:
    """Accuracies in percent with one decimal, everything else with four significant digits."""
    if "accuracy" in metric:
        return f"{100 * value:.1f}"
    return f"{value:.2g}" if sd else f"{value:.4g}"


def text(cell: Cell | None, metric: str, plus_minus: str = "+-") -> str:
    """``98.7 +- 0.3 (3)``: mean, standard deviation, number of runs; what did not finish is said."""
    if cell is None:
        return "-"
    parts = []
    if cell.mean is not None:
        spread = f" {plus_minus} {number(cell.sd, metric, sd=True)}" if cell.sd is not None else ""
        parts.append(f"{number(cell.mean, metric)}{spread} ({cell.n})")
    parts += [f"{status} ({count})" for status, count in cell.unfinished.items()]
    return ", ".join(parts) or "-"


def caption(table: Table) -> str:
    """What the numbers are."""
    unit = " in %" if "accuracy" in table.metric else ""
    where = {"test": " on the test split", "eval": " on the validation split"}
    key = table.metric.removeprefix("best/")
    weights = "the best weights by validation" if table.metric.startswith("best/") else "the last weights"
    said = f"{key.partition('/')[2] or key}{where.get(key.partition('/')[0], '')}{unit}, {weights}"
    dense = "; dense has no ratio and stands in every column" if table.dense is not None and len(table.columns) > 1 else ""
    best = "; best recipe of a column in bold" if table.best else ""
    return f"{table.title}: {said}, mean +- standard deviation over seeds (number of runs){dense}{best}"


def render(table: Table, style: str) -> str:
    """``markdown``, ``latex``, ``csv`` (long form: one line a cell) or ``html``."""
    return {"markdown": markdown, "latex": latex, "csv": as_csv, "html": as_html}[style](table)


def markdown(table: Table) -> str:
    """A table aligned for a terminal too."""
    head = [table.row_name, *table.columns]
    body = [
        [
            row,
            *(
                f"**{t}**" if (row, c) in table.best else t
                for c in table.columns
                for t in [text(table.cells.get((row, c)), table.metric)]
            ),
        ]
        for row in table.rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([caption(table), "", line(head), rule, *map(line, body)]) + "\n"


def latex(table: Table) -> str:
    """A ``table`` environment with booktabs rules."""

    def escape(value: str) -> str:
        return "".join({"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#"}.get(c, c) for c in value).replace("+-", r"$\pm$")

    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escape(caption(table))}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    lines += [" & ".join(map(escape, [table.row_name, *table.columns])) + r" \\", r"\midrule"]
    for row in table.rows:
        cells = []
        for column in table.columns:
            shown = escape(text(table.cells.get((row, column)), table.metric))
            cells.append(rf"\textbf{{{shown}}}" if (row, column) in table.best else shown)
        lines.append(" & ".join([escape(row), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def as_csv(table: Table) -> str:
    """One line a cell, numbers in full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([table.row_name, table.column_name, "metric", "mean", "sd", "n", "best", "unfinished"])
    for row in table.rows:
        for column in table.columns:
            cell = table.cells.get((row, column), Cell(None, None, 0, {}))
            unfinished = sum(cell.unfinished.values())
            writer.writerow(
                [row, column, table.metric, cell.mean, cell.sd, cell.n, int((row, column) in table.best), unfinished]
            )
    return out.getvalue()


def as_html(table: Table) -> str:
    """A page of its own."""
    style = (
        "body{font:15px sans-serif;margin:2em}table{border-collapse:collapse}caption{text-align:left;padding-bottom:.6em}"
        "th,td{padding:.3em .9em;text-align:right}th:first-child{text-align:left}thead th{border-bottom:1px solid}"
    )
    head = "".join(f"<th>{html.escape(label)}</th>" for label in [table.row_name, *table.columns])
    body = ""
    for row in table.rows:
        cells = []
        for column in table.columns:
            shown = html.escape(text(table.cells.get((row, column)), table.metric, "±"))
            cells.append(f"<td><b>{shown}</b></td>" if (row, column) in table.best else f"<td>{shown}</td>")
        body += f"<tr><th>{html.escape(row)}</th>{''.join(cells)}</tr>\n"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(table.title)}</title><style>{style}</style></head>\n'
        f"<body><table><caption>{html.escape(caption(table))}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></body></html>\n"
    )
