"""Tables and figures of an experiment: of exactly the runs of its sweep, missing ones included."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from nmrun.errors import ConfigError, tell
from nmrun.lab.compare.comparison import Comparison, Query, compare
from nmrun.lab.compare.differences import against
from nmrun.lab.compare.runs import row
from nmrun.lab.compare.tables import Table
from nmrun.lab.config.experiment import Experiment
from nmrun.lab.config.identity import run_folder
from nmrun.lab.config.precheck import configs
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
    asked: Mapping[str, Any],
    intact: bool = False,
) -> list[Section]:
    """Report experiments. Of several, those without anything to show yet are left out with a line.

    The rows, columns, metric, filter and baseline that were ``asked`` for win over an experiment's
    own. Raises ConfigError where there is nothing to show of any, and for a key that the runs do
    not have.
    """
    shown = []
    for experiment in every:
        try:
            shown.append(_section(experiment, scale, overrides, asked, intact))
        except Unfinished as error:
            if len(every) == 1:
                raise
            tell([f"left out: {error}"])
    if not shown:
        raise ConfigError(f"no run of any of these experiments is finished at scale={scale}")
    return shown


def _section(
    experiment: Experiment,
    scale: str,
    overrides: Sequence[str],
    asked: Mapping[str, Any],
    intact: bool,
) -> Section:
    given = {key: value for key, value in asked.items() if value}
    names = ("rows", "cols", "metric")
    query = Query.of(**({name: getattr(experiment, name) for name in names} | given))
    collected = runs(experiment, scale, overrides, query.metrics)

    def there(name: str) -> tuple[str, ...]:  # of its own keys those that no run has are left out
        return tuple(k for k in getattr(query, name) if name in given or k in collected)

    asked_for, query = query, replace(query, rows=there("rows"), cols=there("cols"))
    tables = compare(collected, query, intact).tables
    if experiment.baseline and not query.baseline:
        for i, table in enumerate(tables):
            with contextlib.suppress(ConfigError):  # too few runs have finished
                tables[i] = against(table, experiment.baseline)
    # published figures are by the experiment's own
    if query == asked_for and not {"rows", "cols"} & given.keys():
        published, source = experiment.paper, experiment.paper_source
        tables = [replace(table, paper=published, paper_source=source) for table in tables]
    of_pictures = replace(query, baseline="")
    if "metric" in query.cols:  # pictures are of one metric, and tell ratios apart
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
    rows, logged = [], [name.removeprefix("mean/") for name in metrics if name[:5] == "mean/"]
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
            lines = curves.rows(run_dir) if logged else []
            for key in logged:
                values = [line[key] for line in lines if line.get(key) is not None]
                if values:
                    run[f"mean/{key}"] = sum(values) / len(values)
        rows.append(run)
    table = pd.DataFrame(rows, dtype=object)
    if not (table["status"] == "finished").any():
        words = [f"experiment={experiment.word}", f"scale={scale}", *overrides]
        command = shlex.join(["nmrun", "-m", *words])
        raise Unfinished(
            f"{words[0]} scale={scale}: none of its {len(table)} runs is finished; {command} makes them"
        )
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
