"""``nmrun report``: one HTML file with all that there is to know of some runs; it needs no server
and no other file.
"""

from __future__ import annotations

import html
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nmrun.report import captions, formats, plots, status, style
from nmrun.report.formats import Grid, Line
from nmrun.report.history import result
from nmrun.report.tables import Table, label

MOST = 200  # lines of a list; what is more is counted
# keys without a dot that are part of a config
OWN = (
    "seed",
    "recipe",
    "sparsity",
    "dataset",
    "model",
    "optimizer",
    "schedule",
)


def write(
    paths: Sequence[str], parts: Sequence[tuple[pd.DataFrame, Table, str]], target: Path
) -> None:
    """Write the report of the runs below ``paths``, whole or not at all. ``parts``: the runs of
    each table, the table, and the metric of its learning curves. Raises OSError where ``target``
    cannot be written."""
    runs = pd.concat([part for part, _, _ in parts])
    states = [run for path in paths for run in status.runs(Path(path))]
    counts = Counter(run.state for run in states)
    order = [*status.STATES, *sorted(set(counts) - set(status.STATES))]
    counted = ", ".join(f"{counts[state]} {state}" for state in order if counts[state])
    said = [
        f"<h1>{html.escape(', '.join(paths))}</h1>",
        f"<p>{time.strftime('%Y-%m-%d %H:%M')}. Runs: {html.escape(counted)}. Made by "
        f"<code>{html.escape(shlex.join(['nmrun', *sys.argv[1:]]))}</code>.</p>",
        *(_part(*part) for part in parts),
        _unfinished([run for run in states if run.state != "finished"]),
        _configs(runs),
        _environments(runs),
    ]
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(
            formats.page(f"nmrun: {', '.join(paths)}", "\n".join(said)), encoding="utf-8"
        )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _part(runs: pd.DataFrame, table: Table, logged: str) -> str:
    said = [f"<h2>{html.escape(captions.title(table))}</h2>"] + [
        formats.html_table(grid) for grid in formats.grids(table)
    ]
    for kind, about in plots.KINDS.items():
        figure = plots.draw(kind, table, runs, logged)
        if figure is not None:
            said.append(
                f"<figure>{style.embedded(figure, kind)}<figcaption>{html.escape(about.about)}.</figcaption></figure>"
            )
    return "\n".join(said)


def _unfinished(runs: Sequence[status.Run]) -> str:
    if not runs:
        return ""
    said = [f"<h2>Not finished: {len(runs)}</h2>", "<dl>"]
    for run in runs[:MOST]:
        said.append(f"<dt>{html.escape(run.title)}</dt>")
        said += [f"<dd>{html.escape(run.error)}</dd>"] if run.error else []
        said += [f"<dd><code>{html.escape(run.command)}</code></dd>"] if run.command else []
    more = (
        [f"<p>and {len(runs) - MOST} more; <code>nmrun status</code> has them all</p>"]
        if len(runs) > MOST
        else []
    )
    return "\n".join([*said, "</dl>", *more])


def _configs(runs: pd.DataFrame) -> str:
    """The keys that differ, a line for each combination; the others folded away."""
    keys = [
        key
        for key in runs.columns
        if key in OWN or ("." in key and "/" not in key and not key.endswith(".name"))
    ]
    labels = runs[keys].map(label)
    differing = [
        key
        for key in keys
        if labels[key].nunique() > 1 and key not in ("seed", "sparsity.n", "sparsity.m")
    ]
    same = [(key, labels[key].iloc[0]) for key in keys if labels[key].nunique() == 1]
    seeds = (
        labels["seed"].groupby([labels[key] for key in differing], sort=False)
        if differing
        else [((), labels["seed"])]
    )
    lines: list[Line] = []
    for values, of in seeds:
        names = [str(value) for value in (values if isinstance(values, tuple) else (values,))]
        lines.append(
            (names, [(", ".join(sorted(set(of), key=lambda seed: (len(seed), seed))), False)])
        )
    head = [*differing, "seeds"]
    caption = f"{len(lines)} combinations" + (
        f", of which {MOST} are shown" if len(lines) > MOST else ""
    )
    table = formats.html_table(Grid(caption, len(differing), head, lines[:MOST]))
    common = formats.html_table(
        Grid("", 1, ["key", "value"], [([key], [(value, False)]) for key, value in same])
    )
    return f"<h2>Configurations</h2>\n{table}<details><summary>The same in all runs: {len(same)} keys</summary>{common}</details>"


def _environments(runs: pd.DataFrame) -> str:
    """What the runs were made with, each combination once with the number of its runs."""
    found: Counter[str] = Counter()
    for folder in runs["folder"]:
        made_with = result({"folder": folder}).get("environment", {})
        found[json.dumps({key: value for key, value in made_with.items() if key != "command"})] += 1
    environments = [(json.loads(text), count) for text, count in found.most_common(MOST)]
    keys = list(dict.fromkeys(key for environment, _ in environments for key in environment))
    lines: list[Line] = [
        (
            ["" if environment.get(key) is None else str(environment[key]) for key in keys],
            [(str(count), False)],
        )
        for environment, count in environments
    ]
    commits = {environment.get("commit") for environment, _ in environments}
    note = (
        f"<p>These runs were made by {len(commits)} versions of the code.</p>\n"
        if len(commits) > 1
        else ""
    )
    return f"<h2>Made with</h2>\n{note}{formats.html_table(Grid('', len(keys), [*keys, 'runs'], lines))}"
