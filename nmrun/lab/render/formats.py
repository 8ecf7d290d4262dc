"""Comparisons written down: Markdown and LaTeX to be read, CSV and JSON for programs; tables as HTML
for pages."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nmrun.lab.compare import runs
from nmrun.lab.compare.comparison import Comparison, lines
from nmrun.lab.compare.notation import MINUS
from nmrun.lab.render import grids, latex
from nmrun.lab.render.grids import Grid

READABLE = ("markdown", "latex")


def render(comparison: Comparison, style: str) -> str:
    """Write a comparison down: its tables, or where it is over all cells, that.

    ``style`` is ``markdown``, ``latex``, ``csv`` or ``json``. Texts are ASCII, but for minus signs
    and the users' own names.
    """
    if style not in READABLE:
        return runs.as_text(lines(comparison), style)
    every = [grids.over_all_cells(comparison)] if comparison.overall else []
    if style == "latex":
        written = [latex.over_all_cells(grid) for grid in every]
        return "\n".join(written or [latex.table(table) for table in comparison.tables])
    shown = every or [grid for table in comparison.tables for grid in grids.grids(table)]
    return "\n".join(map(markdown, shown))


def markdown(grid: Grid) -> str:
    """Aligned for a terminal too."""
    lines = [
        [*labels, *(f"**{figure.text}**" if figure.bold else figure.text for figure in figures)]
        for labels, figures in grid.lines
    ]
    above = "\n".join(map(plain, grid.caption))
    return f"{above}\n\n{aligned(grid.head, lines)}\n"


def html_table(grid: Grid) -> Markup:
    """The caption and a ``table`` element, which scrolls by itself where the page is narrow."""
    return filled("table.html", grid=grid)


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
