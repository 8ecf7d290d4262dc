"""Tables in Markdown that a terminal shows as well."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
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
