"""The looks of pictures. Lines differ in colour, marker and dashes, so that nothing is lost in grey
print or to colour-blind readers. ``paper.mplstyle`` has fonts, sizes and lines."""

from __future__ import annotations

import contextlib
import html
import io
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun import atomic
from nmrun.lab.compare import notation
from nmrun.lab.compare.notation import Key
from nmrun.lab.compare.tables import Table
from nmrun.lab.output import quantity
from nmrun.lab.render import captions
from nmrun.ranges import Check, check_values, number

INK = "#1a1a1a"  # of paper.mplstyle
GREY = "#777777"
# Okabe and Ito's palette for colour-blind readers, without the yellow, which is too pale for a line
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
MARKERS = "osD^vPX*"  # one more than colours, so that no two of the first 56 lines look the same
LINES = ("-", "--", "-.", ":")
REFERENCE_LINES = ("--", ":", "-.")
SWITCHES = "STEP's switch"  # of lines that are no row of the table
FEW = 7  # at most so many lines in a panel
ACROSS = 3  # panels in a row, and one more where they would be four rows
NARROW = 4.6  # inches; a legend beside takes too much of less
LOWEST = 2.1  # inches; of a panel with its labels
AXES = 1.7  # inches at least between the axes, whatever title, legend and labels take
INCHES = number(1, 40)  # that a picture may be wide
LIMITS = Check(
    "LOW,HIGH, such as 90,100",
    lambda ends: len(ends) == 2 and -math.inf < ends[0] < ends[1] < math.inf,
)
LETTERS, LINE = 14, 0.16  # letters on an inch, and inches of a line, in the style's fonts


@dataclass(frozen=True)
class Layout:
    """The user's wishes for a picture; None: the default.

    ``title`` is by default what all runs have in common; empty: none. ``width`` is in inches; fonts
    keep their size. ``ylim`` is in the units that the axis shows. ``x`` of learning curves is
    ``step``, ``epoch`` or ``seconds``.
    """

    title: str | None = None
    width: float | None = None
    ylim: tuple[float, float] | None = None
    x: str = "step"

    def __post_init__(self) -> None:
        asked = {key: value for key, value in vars(self).items() if value is not None}
        check_values({"ylim": LIMITS, "width": INCHES}, asked)

    def size(self, width: float, height: float, down: int = 1) -> tuple[float, float]:
        """That of a picture which is so large by itself, with so many panels below each other."""
        if self.width is None:
            return width, height
        return self.width, max(height * self.width / width, LOWEST * down)


@contextlib.contextmanager
def looks(salt: str = "nmrun") -> Iterator[None]:
    """Draw and save in ``paper.mplstyle``. ``salt`` tells names of SVGs on one page apart."""
    with mpl_style.context(Path(__file__).with_name("paper.mplstyle")):
        matplotlib.rcParams["svg.hashsalt"] = salt
        yield


def look(table: Table, row: Key) -> dict[str, Any]:
    """Colour, marker and line of a row, the same in every picture; a reference is grey."""
    if row in table.references:
        place = [r for r in table.rows if r in table.references].index(row)
        return {"color": GREY, "linestyle": REFERENCE_LINES[place % len(REFERENCE_LINES)]}
    return of_number([r for r in table.rows if r not in table.references].index(row))


def of_number(i: int) -> dict[str, Any]:
    """Colour, marker and line of the ``i``-th line."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINES[i // len(COLOURS) % len(LINES)],
    }


def named(table: Table, row: Key) -> str:
    """The name of a row, with the number of its runs that the picture does not show."""
    missing = sum((Counter(cell.without) for cell in table.cells_of(row)), Counter[str]())
    name = " ".join(notation.column(table.row_keys, row))
    reasons = ", ".join(f"{count} {reason}" for reason, count in missing.items())
    return name + (f" ({reasons})" if missing else "")


def seeds(table: Table) -> str:
    """How many seeds the means are over: ``3 seeds``, ``2 to 3 seeds``."""
    counts = sorted({cell.n for cell in table.cells.values() if cell.n})
    if not counts:
        return "no seed"
    fewest, most = counts[0], counts[-1]
    return quantity(fewest if fewest == most else f"{fewest} to {most}", "seed")


def heading(table: Table) -> str:
    """What all runs of a table have in common, and the number of seeds."""
    text = f"{captions.title(table, in_papers=True)}; mean and sd of {seeds(table)}"
    return text.removeprefix("; ")


def title(figure: Figure, usual: str, layout: Layout) -> None:
    """Above the picture: the user's, or the usual one."""
    if text := usual if layout.title is None else layout.title:
        figure.suptitle(textwrap.fill(text, int(LETTERS * figure.get_figwidth())))


def panels(headings: list[str], layout: Layout) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each heading, side by side, and its axes, which are common."""
    count = len(headings)
    across = 2 if count == 4 else min(ACROSS + (count > ACROSS**2), count)
    down = -(-count // across)
    size = layout.size(1.7 + 2.7 * across, 0.6 + 2.2 * down, down)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_axis_off()
    for i, heading in enumerate(headings):
        axes[i].set_title(heading)
        # the lowest of each column of panels, though it be not in the last row
        axes[i].tick_params(labelbottom=i + across >= count)
    return figure, axes[:count]


def legend(figure: Figure) -> None:
    """One legend for all panels: beside them, or below where the picture is narrow."""
    handles = {
        text: handle
        for axes in figure.axes
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    entries = dict(sorted(handles.items(), key=lambda entry: entry[0] == SWITCHES))  # last
    if not entries:
        return
    width, height = figure.get_size_inches()
    below = width < NARROW
    across = max(1, int(width * LETTERS / (5 + max(map(len, entries))))) if below else 1
    if below:
        figure.set_figheight(height + LINE * -(-len(entries) // across))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center" if below else "outside right center",
        ncols=across,
    )


def fit(figure: Figure) -> None:
    """Give a finished picture as much height as its axes need, and labels of x that would leave it
    as many lines as they need."""
    figure.draw_without_rendering()  # sizes are known after the layout
    for axes in figure.axes:
        label, room = axes.xaxis.label, axes.get_window_extent().width
        box = label.get_window_extent()
        if box.x0 < 0 or box.x1 > figure.bbox.width:
            text = label.get_text()
            label.set_text(textwrap.fill(text, int(len(text) * room / box.width)))
            figure.draw_without_rendering()
    boxes = [axes.get_window_extent() for axes in figure.axes if axes.axison]
    lacking = AXES - min(box.height for box in boxes) / figure.dpi
    if lacking > 0:
        rows = len({round(box.y0) for box in boxes})
        figure.set_figheight(figure.get_figheight() + lacking * rows)


def x_label(figure: Figure, text: str) -> None:
    """Below each panel that has numbers below it."""
    for axes in figure.axes:
        if axes.axison and axes.xaxis.get_tick_params()["labelbottom"]:
            axes.set_xlabel(text)


IN_THE_DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    + "".join(
        f'[style*="{what}: {INK}"] {{{what}: #e6e6e6 !important}}' for what in ("fill", "stroke")
    )
    + "}</style>"
)


def save(figure: Figure, out: Path) -> None:
    """The format follows the suffix of ``out``. SVG can be read on light and on dark pages."""
    kind = out.suffix[1:].lower()
    drawn = _drawn(figure, kind, out.stem)
    atomic.write(out, for_dark_pages(drawn) if kind == "svg" else drawn, shared=True)


def _drawn(figure: Figure, kind: str, name: str) -> bytes:
    buffer = io.BytesIO()  # a full disk breaks matplotlib's writing of PDF
    dated = {"svg": "Date", "pdf": "CreationDate"}.get(kind)  # same runs, same bytes
    metadata = {dated: None} if dated else None
    with looks(name):
        figure.savefig(buffer, format=kind, metadata=metadata, transparent=kind == "svg")
    return buffer.getvalue()


def for_dark_pages(svg: bytes) -> bytes:
    """A transparent picture whose ink is light where the page is dark."""
    return svg.replace(b"</svg>", f"{IN_THE_DARK}</svg>".encode())


def embedded(figure: Figure, name: str) -> Markup:
    """The picture as an ``svg`` element of a page: its ink is the colour of the page's text. Its
    ``name``, which no other picture has, is for those who cannot see it.
    """
    text = _drawn(figure, "svg", name).decode()
    # inside of HTML an svg element needs no namespaces
    text = re.sub(r'<metadata>.*?</metadata>|\sxmlns(:\w+)?="[^"]*"', "", text, flags=re.DOTALL)
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    label = html.escape(name)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))
