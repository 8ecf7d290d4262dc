"""``nmrun.runs``, ``nmrun.table`` and ``nmrun.plot``: run folders as DataFrames and pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from nmrun.errors import ConfigError
from nmrun.lab.arguments import files_of_the_command
from nmrun.lab.compare.comparison import Keys, Query, compare, lines
from nmrun.lab.compare.runs import filtered, read_runs, summary, typed
from nmrun.lab.render import plots
from nmrun.lab.render.curves import OVER
from nmrun.lab.render.style import Layout
from nmrun.registry import choose

Paths = str | Path | Sequence[str | Path]


def runs(path: Paths = "outputs", filter: Sequence[str] | str = ()) -> pd.DataFrame:
    """Read the runs that have a result into a DataFrame.

    Args:
        path: folders with runs in them.
        filter: conditions ``KEY=VALUE`` or ``KEY!=VALUE``. Runs without the key stay, as with ``nmrun table``.

    Returns:
        A row for each run. The columns are ``dataset``, ``model``, ``recipe``, ``sparsity`` (``2:8``
            or ``dense``), ``optimizer``, ``schedule``, ``seed`` and ``status``; the settings that
            differ between the runs, by their keys (``optimizer.lr``); the metrics
            (``test/accuracy``, ``best/test/accuracy``, ``flops/...``); and ``seconds``, ``metric``
            (the task's own), ``commit``, ``id`` and ``folder``. ``attrs["shared"]`` has the
            settings that do not differ.
    """
    with files_of_the_command():
        return summary(filtered(read_runs(_texts(path)), _texts(filter)))


def table(
    path: Paths = "outputs",
    *,
    rows: Keys = None,
    cols: Keys = None,
    metric: Keys = None,
    filter: Sequence[str] | str = (),
    baseline: str | None = None,
    overall: bool = False,
    verify: bool = False,
) -> pd.DataFrame:
    """Compare runs over their seeds, as ``nmrun table --format csv`` does. ::

        nmrun.table("outputs/digits").pivot(index="recipe", columns="sparsity", values="mean")

    Args:
        path: as of :func:`runs`.
        filter: as of :func:`runs`.
        rows: config keys that make the rows; ``recipe`` by default.
        cols: config keys that make the columns; ``sparsity`` by default.
        metric: the task's own by default; several with ``cols="metric"``.
        baseline: the row that each is compared with, seed by seed.
        overall: give one difference for each row and data set, over all of its cells.
        verify: refuse runs whose files changed after they finished.

    Returns:
        A row for each cell: its labels, ``metric``, ``mean``, ``sd``, ``n``, ``best`` (whether it is
            the best of those it is compared with), ``without`` (the number of runs that gave no value),
            ``median``, ``seeds`` and their ``values``. A baseline adds ``difference``, its 95 %
            interval ``low`` to ``high``, ``p``, and ``least``, the smallest true difference that
            the test would find with a probability of 0.8. Accuracies are from 0 to 1. With
            ``overall`` there is a row for each data set: ``cells``, ``better`` (in how many of
            them), and ``difference`` in standard deviations of a run. For several data sets there
            is one for ``all cells`` as well, and with each left out, ``all but text``.

    Raises:
        ConfigError: for an unknown key, metric, condition or baseline, where no run is left, and
            where runs of a cell differ in more than their seed.
    """
    query = Query.of(rows, cols, metric, _texts(filter), baseline, overall)
    with files_of_the_command():
        comparison = compare(read_runs(_texts(path), strict=verify), query, intact=verify)
    head, *cells = lines(comparison)
    frame = pd.DataFrame(cells, columns=head, dtype=object)
    frame = typed(frame.loc[:, ~frame.columns.duplicated()])  # the metric is a label, too
    labels = head[: head.index("cells" if overall else "mean")]
    for key in map(str, labels):  # texts, those of numbers too
        with contextlib.suppress(ValueError):
            frame[key] = pd.to_numeric(frame[key])
    return frame if overall else frame.astype({"best": bool})


def plot(
    path: Paths = "outputs",
    *,
    kind: str = "ratio",
    baseline: str | None = None,
    rows: Keys = None,
    cols: Keys = None,
    metric: str | None = None,
    filter: Sequence[str] | str = (),
    title: str | None = None,
    width: float | None = None,
    ylim: tuple[float, float] | None = None,
    x: str = "step",
) -> Figure:
    """Draw runs, as ``nmrun plot`` does. Pyplot's backend and figures stay as they were.

    Args:
        path: as of :func:`runs`.
        filter: as of :func:`runs`.
        rows: as of :func:`table`.
        cols: as of :func:`table`.
        metric: as of :func:`table`, but only one.
        kind: what is drawn. ``ratio``: the metric against N:M. ``curves``: the metric in training.
            ``flops``: the metric against the FLOPs. ``overall``: the differences to the baseline.
        baseline: the row that each is compared with, for ``overall``.
        title: above the figure; by default what all runs have in common, ``""`` for none.
        width: in inches; fonts keep their size.
        ylim: the ends of the y axis as it is labelled, such as ``(90, 100)`` for accuracies.
        x: what ``curves`` are drawn against: ``step``, ``epoch`` or ``seconds``.

    Raises:
        ConfigError: as :func:`table`, and where runs of several data sets or models would need
            several figures.
    """
    choose("kind", kind, (*plots.KINDS, "overall"))
    overall = kind == "overall"
    query = Query.of(rows, cols, metric, _texts(filter), baseline, overall)
    layout = Layout(title, width, ylim, choose("x", x, OVER))
    with files_of_the_command():
        figures = plots.plot(read_runs(_texts(path)), query, kind, layout)
    if len(figures) > 1:
        raise ConfigError(
            f"these are {len(figures)} figures, one for each data set and model; choose one by filter, "
            "as in filter=['dataset=digits']"
        )
    return figures[0]


def _texts(value: Paths) -> tuple[str, ...]:
    return (str(value),) if isinstance(value, str | Path) else tuple(map(str, value))
