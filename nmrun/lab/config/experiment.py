"""Experiments: a table or figure of a paper as one file, ``conf/experiment/<name>.yaml``.

Its overrides replace the word ``experiment=NAME`` before Hydra reads it. So its runs are the same,
in the same folders, as those of overrides that were written by hand. An experiment of the user's
own in ``--config-dir`` is another thing: Hydra composes it, as any group.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError, refused
from nmrun.lab.keys import options
from nmrun.lab.runs import documents
from nmrun.ranges import OPTIONAL_TEXT, TEXT, Check
from nmrun.registry import did_you_mean, no_such

SCALES = ("smoke", "small", "paper")
FIGURES = ("ratio", "curves", "flops")


def _are_lines(*values: Any) -> bool:
    try:
        return bool(values) and all(
            isinstance(v, str) and shlex.split(v) is not None for v in values
        )
    except ValueError:  # a quotation mark without its partner
        return False


def _are_sweeps(value: Any) -> bool:
    scales = value.values() if isinstance(value, dict) else [value]
    return all(_are_lines(*(each if isinstance(each, list) else [each])) for each in scales)


LINE = "a line of overrides, its quotations closed"
REPORT = {
    "rows?": TEXT,
    "cols?": TEXT,
    "metric?": OPTIONAL_TEXT,
    "baseline?": OPTIONAL_TEXT,
    "figures?": [str],
}
SHAPE = {
    "title": TEXT,
    "source": TEXT,
    "note?": OPTIONAL_TEXT,
    "sweep": Check(f"{LINE}, a list of such lines, or either of them for each scale", _are_sweeps),
    "scales": Check(
        f"for each of {', '.join(SCALES)} that you want {LINE}",
        lambda value: isinstance(value, dict) and _are_lines(*value.values()),
    ),
    "report?": REPORT,
    "paper?": {"source": TEXT, "values": {str: {str: object}}},
}


@dataclass(frozen=True)
class Experiment:
    """A file of ``conf/experiment``.

    ``sweeps`` has by scale the overrides of each sweep, ``zip=`` included; ``scales`` what each
    scale adds. ``rows`` to ``baseline`` are as for ``nmrun table``; keys that no run has are left
    out. ``figures`` are kinds of ``nmrun plot``, ``curves`` with its key (``curves eval/loss``).
    ``paper`` has the published values as printed, by row and column. ``word`` is what
    ``experiment=`` takes: the name, or the path of a user's own file.
    """

    word: str
    title: str
    source: str
    note: str
    sweeps: dict[str, list[str]]
    scales: dict[str, str]
    paper: dict[str, dict[str, str]]
    paper_source: str
    rows: str = "recipe"
    cols: str = "sparsity"
    metric: str | None = None
    baseline: str | None = None
    figures: Sequence[str] = ()

    @property
    def name(self) -> str:
        return Path(self.word).name.removesuffix(".yaml")


def names() -> list[str]:
    """List the names of the experiments in the package."""
    folder = files("nmrun.conf") / "experiment"
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def selection(text: str) -> list[Experiment]:
    """The experiments of a command line, each once: names with commas between, or ``all``."""
    return [load(name) for name in (names() if text == "all" else dict.fromkeys(text.split(",")))]


def load(name: str) -> Experiment:
    """An experiment by its name, or of a user's own file (``.yaml``).

    Raises ConfigError where there is no such experiment, or the file is none.
    """
    is_file = name.endswith(".yaml")
    if not is_file and name not in names():
        hint = did_you_mean(name, names()) or (
            "; it is a table or figure of a paper; yours are DIR/experiment/NAME.yaml with "
            "--config-dir DIR, and PATH.yaml for a table"
        )
        line = no_such("experiment", name, names(), "nmrun help experiment", hint)
        raise ConfigError(f"experiment={name}: {line}")
    file = Path(name) if is_file else files("nmrun.conf") / "experiment" / f"{name}.yaml"
    content = options.read_yaml(file, f"experiment={name}")
    with refused(f"experiment={name}: ", ValueError):
        return _read(name, content)


def _read(word: str, content: Any) -> Experiment:
    keys = _keys(SHAPE)
    if not isinstance(content, dict):
        raise ValueError(f"it takes the keys {', '.join(keys)}")
    _known("key", content, keys)
    if problem := documents.misfit(content, SHAPE):
        raise ValueError(problem)
    report, paper = content.get("report", {}), content.get("paper", {"source": "", "values": {}})
    scales: dict[str, str] = content["scales"]
    sweep: Any = content["sweep"]
    _known("key of report", report, _keys(REPORT))
    _known("figure", [each.partition(" ")[0] for each in report.get("figures", [])], FIGURES)
    _known("scale", scales, SCALES)
    by_scale: dict[str, Any] = sweep if isinstance(sweep, dict) else dict.fromkeys(scales, sweep)
    if by_scale.keys() != scales.keys():
        raise ValueError(f"sweep: one for each of {', '.join(scales)}, or one for all")
    rows = report.get("rows", Experiment.rows)
    for row in paper["values"]:
        if len(row.split()) != len({*rows.split(",")}):
            raise ValueError(f"paper.values.{row}: it takes a label for each of {rows}")
    printed = paper["values"].items()
    return Experiment(
        word=word,
        title=content["title"],
        source=content["source"],
        note=content.get("note") or "",
        sweeps={key: [each] if isinstance(each, str) else each for key, each in by_scale.items()},
        scales=scales,
        paper={row: {key: str(value) for key, value in cells.items()} for row, cells in printed},
        paper_source=paper["source"],
        **report,
    )


def _keys(shape: Iterable[str]) -> list[str]:
    return [key.rstrip("?") for key in shape]


def _known(what: str, names: Iterable[Any], known: Collection[str]) -> None:
    for name in map(str, names):
        if name not in known:
            raise ValueError(f"{name}: {no_such(what, name, known)}")
