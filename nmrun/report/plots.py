"""The pictures of a table, by kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from nmrun.report import curves, points
from nmrun.report.history import History
from nmrun.report.style import legend
from nmrun.report.tables import Table


@dataclass(frozen=True)
class Kind:
    """``draw`` gives None where the runs have nothing of this kind; ``nothing`` says so, ``about``
    what the picture shows.
    """

    draw: Callable[[Table, pd.DataFrame, History, str], Figure | None]
    about: str
    nothing: str


KINDS = {
    "ratio": Kind(
        lambda table, _runs, _history, _metric: points.ratio(table),
        "The metric against the ratio",
        "no run has finished",
    ),
    "curves": Kind(
        lambda table, _runs, history, metric: curves.curves(table, history, metric),
        "Learning curves; a vertical line is where STEP begins to learn masks",
        "no finished run has a metrics.jsonl with this metric",
    ),
    "flips": Kind(
        lambda table, _runs, history, _metric: curves.flips(table, history),
        "Flip rate: the share of mask entries that a step changed (of the masks to be, while a recipe is dense)",
        "no finished run has logged a flip rate (sparse recipes do, in metrics.jsonl)",
    ),
    "autoswitch": Kind(
        lambda table, _runs, history, _metric: curves.autoswitch(table, history),
        "AutoSwitch: the mean change of Adam's second moment, against the threshold that it has to fall below",
        "no finished run has AutoSwitch's samples (recipe=step with recipe.switch=auto logs them)",
    ),
    "flops": Kind(
        lambda table, runs, _history, _metric: points.flops(table, runs),
        "The metric against the FLOPs of training",
        "no finished run has its FLOPs of training on record",
    ),
}


def draw(kind: str, table: Table, runs: pd.DataFrame, logged: str) -> Figure | None:
    """The picture of ``kind`` of the ``runs`` of ``table``; None where they have nothing to show
    (``KINDS[kind].nothing`` says what).

    ``logged``: the metric of learning curves, such as ``eval/accuracy``.
    """
    figure = KINDS[kind].draw(table, runs, History(table, runs), logged)
    if figure is not None:
        legend(figure)
    return figure
