"""The runs and tables that the options of ``nmrun table``, ``plot`` and ``report`` ask
for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun.errors import ConfigError
from nmrun.lab.report import settings
from nmrun.lab.report.verify import verify
from nmrun.registry import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from nmrun.lab.report.tables import Table


RATIO = ("sparsity", "sparsity.n", "sparsity.m", "sparsity.v")


def tables(options: argparse.Namespace) -> list[Table]:
    """Make the tables that the options of ``nmrun table`` ask for.

    Args:
        options: the parsed command line: ``paths``, ``rows``, ``cols``, ``metric``, ``filter``,
            ``show``, ``verify``, ``baseline``, ``test`` and ``digits``.

    Returns:
        One table for each data set and model, compared with the baseline if there is one.

    Raises:
        ConfigError: for an unknown key, metric or baseline, and where no run is left.
    """
    found = [
        each
        for _, each in parts(options, options.show, verified=options.verify, digits=options.digits)
    ]
    if options.baseline:
        from nmrun.lab.report.differences import compare

        found = [compare(each, options.baseline, options.test) for each in found]
    return found


def runs(options: argparse.Namespace) -> pd.DataFrame:
    """The runs that the options of ``nmrun table --runs`` ask for.

    Args:
        options: the parsed command line: ``paths``, ``filter`` and ``verify``.

    Returns:
        As of :func:`collected`.

    Raises:
        ConfigError: where no run is left.
    """
    found = filtered(collected(options.paths, options.verify), options.filter)
    if options.verify:
        verify(found)
    return found


def parts(
    options: argparse.Namespace,
    statistic: str = "mean",
    several: bool = True,
    runs: pd.DataFrame | None = None,
    verified: bool = False,
    digits: int | None = None,
) -> list[tuple[pd.DataFrame, Table]]:
    """Group runs by data set and model, and make the table of each group.

    A row or column ``dataset`` or ``model`` tells runs apart, so it does not make groups.

    Args:
        options: the parsed command line: ``paths``, ``rows``, ``cols``, ``metric`` and ``filter``.
        statistic: what stands in a cell: ``mean``, ``median`` or ``best``.
        several: allow several metrics in one table.
        runs: the runs, as of :func:`collected`. None, the default: those below the paths.
        verified: refuse runs whose files changed after they finished.
        digits: after the point in a cell; None: as its deviation begins.

    Returns:
        The runs and the table of each group.

    Raises:
        ConfigError: for an unknown key or metric, where no run is left, and for changed files.
    """
    from nmrun.lab.report.tables import build

    runs = collected(options.paths, verified) if runs is None else runs
    metrics, keys = _metrics_and_keys(runs)
    rows, columns = (options.rows or "recipe").split(","), (options.cols or "sparsity").split(",")
    for key in [*rows, *columns]:
        known(key, keys, "key")
    # without a finished run there are no metrics to know, but failures to show
    if (runs["status"] == "finished").any():
        for metric in (options.metric or metrics[0]).split(","):
            known(metric, metrics, "metric")
    if "," in (options.metric or "") and not several:
        raise ConfigError(f"--metric {options.metric}: one at a time")
    if "," in (options.metric or "") and "metric" not in (*rows, *columns):
        raise ConfigError(
            f"--metric {options.metric}: several metrics need a place: --cols metric, say, with --rows recipe,sparsity"
        )
    runs = filtered(runs, options.filter)
    if verified:
        verify(runs)
    groups = [key for key in ("dataset", "model") if key not in (*rows, *columns)]
    return [
        (part, build(part, options.metric or usual_metric(part), rows, columns, statistic, digits))
        for part in ([part for _, part in runs.groupby(groups)] if groups else [runs])
    ]


def collected(paths: Sequence[str], strict: bool = False) -> pd.DataFrame:
    """Read the runs below some paths.

    Args:
        paths: folders with runs in them, or ``wandb://entity/project``.
        strict: refuse results that were changed, which are left out otherwise.

    Returns:
        A row for each run, as of :func:`nmrun.lab.report.collect.collect`.

    Raises:
        ConfigError: where there is no such folder, or no run.
    """
    from nmrun.lab.report.collect import WANDB, collect

    for path in paths:
        if path.startswith(WANDB) or (path.endswith(".csv") and Path(path).is_file()):
            continue
        if Path(path).is_file():
            raise ConfigError(f"{path}: it is a file; name a folder of runs, or a CSV file of them")
        if not Path(path).is_dir():
            raise ConfigError(f"{path}: no such folder")
    runs = collect(paths, strict)
    if runs.empty:
        raise ConfigError(f"no run below {', '.join(paths)} (a run's folder holds result.json)")
    return runs


def _metrics_and_keys(runs: pd.DataFrame) -> tuple[list[str], list[str]]:
    metrics = [c for c in runs.columns if "/" in c] + ["seconds"]
    return metrics, [c for c in runs.columns if c not in metrics]


def usual_metric(runs: pd.DataFrame) -> str:
    """Name the metric of the runs' task on the test split, or on the validation split where there is
    no other. Runs that did not finish do not say which it is.

    Args:
        runs: of one data set, as of :func:`collected`.
    """
    own = runs["metric"].dropna()
    name = own.iloc[0] if len(own) else "accuracy"
    tested = f"test/{name}" in runs and runs[f"test/{name}"].notna().any()
    return f"eval/{name}" if len(own) and not tested and f"eval/{name}" in runs else f"test/{name}"


def logged(runs: pd.DataFrame, table: Table) -> str:
    """Name a table's metric as it is logged in training: on the validation split.

    Args:
        runs: the runs of the table, whose task has a metric.
        table: a table with one metric, such as ``test/accuracy``.

    Returns:
        Its name in ``metrics.jsonl``, such as ``eval/accuracy``.
    """
    split, _, name = table.metric.removeprefix("best/").partition("/")
    return f"eval/{name if split in ('test', 'eval') else usual_metric(runs).partition('/')[2]}"


def filtered(runs: pd.DataFrame, conditions: Sequence[str]) -> pd.DataFrame:
    """Keep the runs whose keys have some values.

    A run without such a key stays: an STE run has no ``recipe.switch`` to differ in, and dense
    training, the reference, has no ratio.

    Args:
        runs: as of :func:`collected`.
        conditions: ``KEY=VALUE`` each, such as ``optimizer.lr=0.001``, or several values with
            commas between. All conditions must hold.

    Returns:
        The rows that are left.

    Raises:
        ConfigError: for a condition that is not ``KEY=VALUE``, an unknown key, or a value that no
            run has that is left.
    """
    from nmrun.lab.report.labels import label

    for condition in conditions:
        if "=" not in condition:
            raise ConfigError(
                f"--filter {condition}: write KEY=VALUE, such as optimizer.lr=0.001 (folders come before --filter)"
            )
        key, values = settings.alternatives(condition)
        known(key, _metrics_and_keys(runs)[1], "key")
        labels = runs[key].map(label)
        fitting = set[str]()
        for value in values:
            found = {t for t in set(labels) if settings.same(t, value.replace(" ", ""))}
            if not found:
                there = ", ".join(sorted(set(labels) - {"-"}))
                raise ConfigError(f"--filter {key}={value} leaves no run; {key} is {there}")
            fitting |= found
        without = labels == "-" if key not in RATIO else runs["sparsity"] == "dense"
        runs = runs[labels.isin(fitting) | without]
    return runs


def known(name: str, names: Sequence[str], what: str) -> None:
    """Raise ConfigError for a name that the runs have not.

    Args:
        name: as it was given.
        names: those that there are.
        what: the word for them: ``key`` or ``metric``.
    """
    if name not in names:
        by_leaf = [n for n in names if n.rpartition(".")[2] == name]
        hint = f"; did you mean {' or '.join(by_leaf)}?" if by_leaf else did_you_mean(name, names)
        family = [n for n in names if n.partition(".")[0] == name.partition(".")[0]] or [
            n for n in names if "." not in n
        ]
        raise ConfigError(
            f"no {what} {name!r} in these runs{hint} (there are {', '.join(sorted(family))})"
        )
