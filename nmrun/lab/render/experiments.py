"""Tables and figures of an experiment: of exactly the runs of its sweep, missing ones included."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from nmrun.errors import ConfigError, tell
from nmrun.lab.compare.comparison import Comparison, Query, compare, keys
from nmrun.lab.compare.differences import against
from nmrun.lab.compare.runs import check_name, metrics_and_keys, row, verify
from nmrun.lab.compare.tables import Table
from nmrun.lab.config.experiment import Experiment, configs
from nmrun.lab.config.identity import run_folder
from nmrun.lab.render import curves, formats, plots, style
from nmrun.lab.render.curves import History
from nmrun.lab.runs.run_folder import RESULT, RunFolder


class Unfinished(ConfigError):
    """An experiment without anything to show yet."""


@dataclass(frozen=True)
class Section:
    """An experiment in a report: its tables, and the tables that its pictures show."""

    experiment: Experiment
    scale: str
    tables: list[Table]
    picture_tables: list[Table]


def sections(
    every: Sequence[Experiment],
    scale: str,
    overrides: Sequence[str],
    query: Query,
    intact: bool = False,
) -> list[Section]:
    """Report experiments. Of several, those without anything to show yet are left out with a line.

    The keys, metrics and baseline of ``query`` win over an experiment's own. Raises ConfigError
    where there is nothing to show of any, and for a key that no run has.
    """
    shown: list[tuple[Experiment, Query, pd.DataFrame]] = []
    for experiment in every:
        theirs = replace(
            query,
            rows=query.rows or keys(experiment.rows),
            cols=query.cols or keys(experiment.cols),
            metrics=query.metrics or keys(experiment.metric),
        )
        try:
            collected = runs(experiment, scale, overrides, theirs.metrics)
        except Unfinished as error:
            if len(every) == 1:
                raise
            tell([f"left out: {error}"])
            continue
        if intact:
            verify(collected)
        shown.append((experiment, theirs, collected))
    if not shown:
        raise ConfigError(f"no run of any of these experiments is finished at scale={scale}")
    known = list(
        dict.fromkeys(column for *_, frame in shown for column in metrics_and_keys(frame)[1])
    )
    for key in (*query.rows, *query.cols):
        check_name(key, known, "key")
    return [_section(experiment, scale, theirs, frame) for experiment, theirs, frame in shown]


def _section(experiment: Experiment, scale: str, query: Query, collected: pd.DataFrame) -> Section:
    # published figures are by the experiment's own rows and columns
    own = (query.rows, query.cols) == (keys(experiment.rows), keys(experiment.cols))
    rows, cols = (
        tuple(key for key in each if key in collected.columns) for each in (query.rows, query.cols)
    )
    query = replace(query, rows=rows, cols=cols)
    tables = compare(collected, query).tables
    if experiment.baseline and not query.baseline:
        tables = [compared(table, experiment.baseline) for table in tables]
    if own:
        tables = [
            replace(table, paper=experiment.paper, paper_source=experiment.paper_source)
            for table in tables
        ]
    of_pictures = replace(query, baseline="")
    if "metric" in cols:  # pictures are of one metric, and tell ratios apart
        of_pictures = replace(of_pictures, cols=("sparsity",), metrics=query.metrics[:1])
    return Section(experiment, scale, tables, compare(collected, of_pictures).tables)


def runs(
    experiment: Experiment, scale: str, overrides: Sequence[str] = (), metrics: Sequence[str] = ()
) -> pd.DataFrame:
    """The runs of an experiment, as ``nmrun.lab.compare.runs.collect`` has those of folders. One
    without a result has the status ``missing``.

    ``test/score`` is the task's metric. Of what training logged there are those of ``metrics``:
    ``mean/<key>`` over all values. Raises Unfinished if no run is finished.
    """
    rows = []
    for config in configs(experiment, scale, overrides):
        folder = run_folder(config)
        run_dir = RunFolder(folder)
        if run_dir.problem:
            tell([f"{folder / RESULT} left out: {run_dir.problem}"])
        missing: dict[str, Any] = {
            "status": "damaged" if run_dir.problem else "missing",
            "id": "",
            "config": config.plain,
            "metrics": {"final": {}, "best": {}},
        }
        run = row(run_dir.result or missing, folder)
        if run["status"] == "finished":
            run["test/score"] = run.get(f"test/{run['metric']}")
            run |= {key: value for key in metrics if (value := _from_log(run_dir, key)) is not None}
        rows.append(run)
    table = pd.DataFrame(rows, dtype=object)
    if not (table["status"] == "finished").any():
        words = [f"experiment={experiment.word}", f"scale={scale}", *overrides]
        command = shlex.join(["nmrun", "-m", *words])
        raise Unfinished(
            f"{words[0]} scale={scale}: none of its {len(table)} runs is finished; {command} makes them"
        )
    return table


def _from_log(run: RunFolder, metric: str) -> float | None:
    kind, _, key = metric.partition("/")
    if kind != "mean":
        return None
    values = [line[key] for line in curves.rows(run) if line.get(key) is not None]
    return sum(values) / len(values) if values else None


def compared(table: Table, baseline: str) -> Table:
    """Add differences to the experiment's baseline, unless too few runs have finished."""
    with contextlib.suppress(ConfigError):
        return against(table, baseline)
    return table


def render(sections: Sequence[Section], style_: str) -> str:
    """Title, source, note and tables of each, as ``markdown`` or ``latex``; as ``csv`` and ``json``
    the tables of one alone."""
    if style_ in ("csv", "json"):
        return formats.render(Comparison(sections[0].tables), style_)
    mark, comment = ("%", "% ") if style_ == "latex" else ("#", "")
    parts = []
    for section in sections:
        about = section.experiment
        head = f"{mark} {about.title} ({about.source}), scale {section.scale}\n"
        note = f"{comment}{about.note}\n\n" if about.note else ""
        tables = formats.render(Comparison(section.tables), style_)
        parts.append(f"{head}{note}{tables}")
    return "\n".join(parts)


def draw(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write the pictures as PNG, by the name of experiment, scale and kind."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for section in sections:
        for i, (kind, figure) in enumerate(_figures(section), 1):
            files.append(folder / f"{section.experiment.name}-{section.scale}-{i}-{kind}.png")
            style.save(figure, files[-1])
    return files


def _figures(section: Section) -> Iterator[tuple[str, Figure]]:
    """Each picture with its kind, without those for which nothing was logged."""
    for figure_of in section.experiment.figures:
        kind, _, key = figure_of.partition(" ")
        for table in section.picture_tables:
            figure = plots.draw(kind, History(table), key)
            if figure is not None:
                yield kind, figure
