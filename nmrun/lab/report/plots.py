"""The pictures of a table, by kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from nmrun.lab.report import curves, points
from nmrun.lab.report.history import History
from nmrun.lab.report.style import Layout, high_enough, legend, looks
from nmrun.lab.report.tables import Table

PLAIN = Layout()


@dataclass(frozen=True)
class Kind:
    """``draw`` gives None where the runs have nothing of this kind; ``nothing`` says so, ``about``
    what the picture shows.
    """

    draw: Callable[[Table, pd.DataFrame, History, str, Layout], Figure | None]
    about: str
    nothing: str


KINDS = {
    "ratio": Kind(
        lambda table, _runs, _history, _metric, layout: points.ratio(table, layout),
        "The metric against the ratio",
        "no run has finished",
    ),
    "curves": Kind(
        lambda table, _runs, history, metric, layout: curves.curves(table, history, metric, layout),
        "Learning curves; a vertical line is where STEP begins to learn masks",
        "no finished run has this metric at two steps or more in its metrics.jsonl",
    ),
    "flips": Kind(
        lambda table, _runs, history, _metric, layout: curves.flips(table, history, layout),
        "Flip rate: the share of mask entries that a step changed (of the masks to be, while a recipe is dense)",
        "no finished run has logged a flip rate (sparse recipes do, in metrics.jsonl)",
    ),
    "autoswitch": Kind(
        lambda table, _runs, history, _metric, layout: curves.autoswitch(table, history, layout),
        "AutoSwitch: the mean change of Adam's second moment, against the threshold that it has to fall below",
        "no finished run has AutoSwitch's samples (recipe=step with recipe.switch=auto logs them)",
    ),
    "flops": Kind(
        lambda table, runs, _history, _metric, layout: points.flops(table, runs, layout),
        "The metric against the FLOPs of training",
        "no finished run has its FLOPs of training on record",
    ),
}


def draw(
    kind: str,
    table: Table,
    runs: pd.DataFrame,
    logged: str,
    layout: Layout = PLAIN,
) -> Figure | None:
    """Draw the picture of a kind.

    Args:
        kind: one of ``KINDS``.
        table: the table.
        runs: its runs.
        logged: the metric of learning curves, such as ``eval/accuracy``.
        layout: what the user wants of it.

    Returns:
        None where the runs have nothing to show (``KINDS[kind].nothing`` says what).
    """
    with looks():
        figure = KINDS[kind].draw(table, runs, History(table, runs), logged, layout)
        if figure is not None:
            legend(figure)
            high_enough(figure, layout)
    return figure
