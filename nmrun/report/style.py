"""How pictures look: told apart by colour, marker and line, so that print in grey and colour-blind
readers lose nothing.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from nmrun.patterns import Pattern, PatternError
from nmrun.report.tables import Key, Table, words

# Okabe and Ito's palette for colour-blind readers, without the yellow, which is too pale for a line
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"  # one more than colours, so that no two of the first 56 lines look the same
LINES = ("-", "--", "-.", ":")
REFERENCE_LINES = ("--", ":", "-.")
ACROSS = 3  # panels in a row


def look(table: Table, row: Key) -> dict[str, Any]:
    """Colour, marker and line of a row, the same in every picture of the table; a reference is grey
    and has no marker.
    """
    if row in table.references:
        place = [r for r in table.rows if r in table.references].index(row)
        return {"color": "#555555", "linestyle": REFERENCE_LINES[place % len(REFERENCE_LINES)]}
    i = [r for r in table.rows if r not in table.references].index(row)
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINES[i // len(COLOURS) % len(LINES)],
    }


def label(table: Table, row: Key) -> str:
    """The row, and how many of its runs the picture does not show."""
    cells = {
        id(cell): cell for (r, _), cell in table.cells.items() if r == row
    }.values()  # a reference is one cell in all columns
    missing = sum(sum(cell.without.values()) for cell in cells)
    return words(table.row_keys, row) + (f" ({missing} not finished)" if missing else "")


def column_name(table: Table, column: Key) -> str:
    """The heading of a panel: ``1:8 (12.5 % of the weights)``, or the keys and their values."""
    if table.column_keys == ("sparsity",):
        try:
            return f"{column[0]} ({100 * Pattern.parse(column[0]).density:.3g} % of the weights)"
        except PatternError:
            return column[0]
    return ", ".join(f"{key} {value}" for key, value in zip(table.column_keys, column, strict=True))


def panels(table: Table, columns: list[Key]) -> tuple[Figure, list[Axes]]:
    """One panel a column of the table, side by side, with common axes."""
    across = min(ACROSS, len(columns))
    down = -(-len(columns) // across)
    figure = Figure(figsize=(1.9 + 3.3 * across, 0.6 + 2.7 * down), layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[len(columns) :]:
        spare.set_axis_off()
    for i, column in enumerate(columns):
        plain(axes[i])
        axes[i].set_title(column_name(table, column), fontsize=10)
        # the lowest of each column of panels, though it be not in the last row
        axes[i].tick_params(labelbottom=i + across >= len(columns))
    return figure, axes[: len(columns)]


def plain(axes: Axes) -> None:
    """A frame without ornaments."""
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure) -> None:
    """One legend for all panels, beside them."""
    entries = {
        text: handle
        for axes in figure.axes
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if entries:
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside right center",
            frameon=False,
            fontsize=9,
            handlelength=3,
        )


def _as_written(figure: Figure) -> None:
    """Dollar signs in names are no formulas; those of tick labels are."""
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    ticks = [text for axis in axes for text in axis.get_ticklabels(which="both")]
    formulas = {id(text) for text in (*ticks, *(axis.get_offset_text() for axis in axes))}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and id(text) not in formulas:
            text.set_parse_math(False)


def save(figure: Figure, out: Path) -> None:
    """The format follows the suffix of ``out``."""
    _as_written(figure)
    figure.savefig(out, dpi=150)


def embedded(figure: Figure, name: str) -> str:
    """The picture as an ``img`` element that has all of it inside."""
    picture = io.BytesIO()
    _as_written(figure)
    figure.savefig(picture, format="png", dpi=120)
    return f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
