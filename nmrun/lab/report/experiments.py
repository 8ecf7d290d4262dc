"""Tables and figures of an experiment: of exactly the runs that its sweep consists of, those that
are missing included.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from nmrun.errors import ConfigError, tell
from nmrun.lab.report import chosen, formats, history, pages, plots, records, style
from nmrun.lab.report.collect import row
from nmrun.lab.report.differences import compare
from nmrun.lab.report.tables import Table
from nmrun.lab.report.verify import verify
from nmrun.lab.runs.run_folder import RESULT, RunFolder
from nmrun.lab.words.experiment import Experiment, configs
from nmrun.lab.words.identity import run_folder

KINDS = {
    "mean": lambda values: sum(values) / len(values),
    "positive": lambda values: sum(value > 0 for value in values) / len(values),
}


class Unfinished(ConfigError):
    """An experiment of which there is nothing to show yet."""


@dataclass(frozen=True)
class Section:
    """An experiment as it is reported: its tables, and the runs and tables that its pictures are
    of.
    """

    asked: Experiment
    scale: str
    tables: list[Table]
    parts: list[tuple[pd.DataFrame, Table]]


def sections(every: Sequence[Experiment], options: argparse.Namespace) -> list[Section]:
    """Report experiments as the options of ``nmrun table`` ask for.

    One of several of which there is nothing to show yet is left out, and that is said.

    Args:
        every: the experiments.
        options: the parsed command line: ``scale`` and ``paths``, which are overrides here;
            ``rows``, ``cols`` and ``metric``, which win over the experiment's own; ``filter``,
            ``show``, ``verify``, ``baseline`` and ``test``.

    Raises:
        ConfigError: where there is nothing to show of any of them.
    """
    found = []
    for asked in every:
        own = argparse.Namespace(**vars(options))
        own.rows, own.cols, own.metric = (
            options.rows or asked.rows,
            options.cols or asked.cols,
            options.metric or asked.metric,
        )
        try:
            collected = runs(asked, options.scale, options.paths, (own.metric or "").split(","))
        except Unfinished as error:
            if len(every) == 1:
                raise
            print(f"nmrun: left out: {error}", file=sys.stderr)
            continue
        found.append(_section(asked, own, collected))
    if not found:
        raise ConfigError(
            f"no run of any of these experiments is finished at scale={options.scale}"
        )
    return found


def _section(asked: Experiment, own: argparse.Namespace, collected: pd.DataFrame) -> Section:
    if own.verify:
        verify(collected)
    own.rows, own.cols = (
        ",".join(k for k in keys.split(",") if k in collected.columns)
        for keys in (own.rows, own.cols)
    )
    tables = [
        with_paper(each, asked)
        for _, each in chosen.parts(own, own.show, runs=collected, digits=own.digits)
    ]
    if own.baseline:
        tables = [compare(each, own.baseline, own.test) for each in tables]
    elif asked.baseline:
        tables = [compared(each, asked.baseline, own.test) for each in tables]
    if "metric" in own.cols:  # pictures are of one metric, and tell ratios apart
        own.cols, own.metric = "sparsity", own.metric.split(",")[0]
    return Section(asked, own.scale, tables, chosen.parts(own, runs=collected))


def runs(
    asked: Experiment, scale: str, overrides: Sequence[str] = (), metrics: Sequence[str] = ()
) -> pd.DataFrame:
    """Collect the runs of an experiment, as ``nmrun.lab.report.collect.collect`` does of folders.

    A run that has no result yet has the status ``missing``. Beside a run's own metrics there is
    ``test/score``, the one of the task, where tasks differ in it.

    Args:
        asked: the experiment.
        scale: one of its scales.
        overrides: win over those of the experiment.
        metrics: of what was logged in training: ``mean/<key>`` over all values, and
            ``positive/<key>``, the share of those above 0.

    Returns:
        One row for each run.

    Raises:
        Unfinished: if no run is finished.
    """
    rows = []
    for config in configs(asked, scale, overrides):
        folder = run_folder(config)
        there = RunFolder(folder)
        if there.problem:
            tell([f"{folder / RESULT} left out: {there.problem}"])
        missing: dict[str, Any] = {
            "status": "damaged" if there.problem else "missing",
            "id": "",
            "config": config.plain,
            "metrics": {"final": {}, "best": {}},
        }
        found = row(there.result or missing, folder)
        if found["status"] == "finished":
            found["test/score"] = found.get(f"test/{found['metric']}")
            found |= {key: value for key in metrics if (value := _logged(folder, key)) is not None}
        rows.append(found)
    table = pd.DataFrame(rows, dtype=object)
    if not (table["status"] == "finished").any():
        command = " ".join([f"nmrun -m experiment={asked.name} scale={scale}", *overrides])
        raise Unfinished(
            f"experiment={asked.name} scale={scale}: none of its {len(table)} runs is finished; {command} makes them"
        )
    return table


def _logged(folder: Path, metric: str) -> float | None:
    kind, _, key = metric.partition("/")
    if kind not in KINDS:
        return None
    values = [line[key] for line in history.rows(str(folder)) if line.get(key) is not None]
    return KINDS[kind](values) if values else None


def with_paper(table: Table, asked: Experiment) -> Table:
    """The table with the published figures beside ours."""
    return replace(table, paper=asked.paper, paper_source=asked.paper_source)


def compared(table: Table, baseline: str, test: str) -> Table:
    """With differences to the experiment's baseline, unless too little is finished for that."""
    with contextlib.suppress(ConfigError):
        return compare(table, baseline, test)
    return table


def render(sections: Sequence[Section], style_: str, method: bool = False) -> str:
    """Write title, source, note and tables of each.

    Args:
        sections: the experiments.
        style_: ``markdown``, ``latex``, ``html`` (one page with the pictures in it), or ``csv``
            and ``json`` (the tables alone).
        method: as of :func:`nmrun.lab.report.formats.render`.
    """
    if style_ in ("csv", "json"):
        return str(records.written(records.of_cells(sections[0].tables), style_))
    if style_ == "html":
        body = Markup("").join(map(_html, sections))
        return pages.document("page.html", title="nmrun: experiments", body=body)
    mark = "%" if style_ == "latex" else "#"
    heads = [f"{mark} {s.asked.title} ({s.asked.source}), scale {s.scale}\n" for s in sections]
    notes = [
        f"{'% ' if style_ == 'latex' else ''}{s.asked.note}\n\n" if s.asked.note else ""
        for s in sections
    ]
    return "\n".join(
        f"{h}{n}{formats.render(s.tables, style_, method=method)}"
        for h, n, s in zip(heads, notes, sections, strict=True)
    )


def draw(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write the pictures as PNG, by the name of experiment, scale and kind.

    Args:
        sections: the experiments.
        folder: made if needed.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for section in sections:
        for i, (kind, figure) in enumerate(_figures(section), 1):
            files.append(folder / f"{section.asked.name}-{section.scale}-{i}-{kind}.png")
            style.save(figure, files[-1])
    return files


def _figures(section: Section) -> Iterator[tuple[str, Figure]]:
    """Each picture with its kind; those for which nothing was logged are left out."""
    for said in section.asked.figures:
        kind, _, key = said.partition(" ")
        for part, table in section.parts:
            figure = plots.draw(kind, table, part, key)
            if figure is not None:
                yield kind, figure


def _html(section: Section) -> Markup:
    return pages.filled(
        "experiment.html",
        asked=section.asked,
        scale=section.scale,
        tables=[formats.html_table(g) for table in section.tables for g in formats.grids(table)],
        pictures=[
            style.embedded(figure, f"{section.asked.name}-{i}-{kind}")
            for i, (kind, figure) in enumerate(_figures(section), 1)
        ],
    )
