"""Experiments: a table or figure of a paper as one file, ``conf/experiment/<name>.yaml``.

On a command line ``experiment=NAME scale=SCALE`` stands for the overrides of that file, and is
replaced by them before Hydra reads it:
a run is the same run, in the same folder, whether it was asked for by an experiment or by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from nmrun.config import schema, source, zipped
from nmrun.config.identity import run_folder
from nmrun.errors import ConfigError
from nmrun.registry import did_you_mean
from nmrun.settings.config import Config

SCALES = ("smoke", "small", "paper")
FIGURES = ("ratio", "curves", "flips", "autoswitch", "flops")
REPORT: dict[str, Any] = {
    "rows": "recipe",
    "cols": "sparsity",
    "metric": None,
    "baseline": None,
    "figures": [],
}
KEYS = {"title", "source", "note", "sweep", "scales", "report", "paper"}


@dataclass(frozen=True)
class Experiment:
    """A file of ``conf/experiment``.

    ``sweeps`` are run one after the other, each a product of overrides as on a command line
    (``zip=`` is understood as well); those of the ``scales`` come on top of each. ``rows``,
    ``cols``, ``metric`` and ``baseline`` are as for ``nmrun table`` (keys that no run has at a
    scale are left out), ``figures`` kinds of ``nmrun plot``, ``curves`` with the key that was
    logged (``curves eval/loss``). ``paper`` are published figures as they are printed, by row and
    column, and ``paper_source`` says where they stand.
    """

    name: str
    title: str
    source: str
    note: str
    sweeps: list[str]
    scales: dict[str, str]
    rows: str
    cols: str
    metric: str | None
    baseline: str | None
    figures: list[str]
    paper: dict[str, dict[str, str]]
    paper_source: str

    def overrides(self, scale: str, own: Sequence[str] = ()) -> list[list[str]]:
        """Each sweep as a list of overrides. Of two for the same key, that of the scale wins over
        the sweep's, and ``own`` over both.

        Raises ConfigError for a scale that does not exist.
        """
        if scale not in self.scales:
            raise ConfigError(
                f"scale={scale}: no such scale{did_you_mean(scale, self.scales)} (there are {', '.join(self.scales)})"
            )
        found = []
        for sweep in self.sweeps:
            words = [*shlex.split(sweep), *shlex.split(self.scales[scale]), *own]
            last = {word if zipped.key(word) == "zip" else zipped.key(word): word for word in words}
            found += zipped.rows(list(last.values()))
        return found


def names() -> list[str]:
    """All experiments that come with the package."""
    folder = files("nmrun.conf") / "experiment"
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def chosen(text: str) -> list[Experiment]:
    """Those of a command line: names by commas, or ``all``."""
    return [load(name) for name in (names() if text == "all" else text.split(","))]


def load(name: str) -> Experiment:
    """The experiment of that name, or of a file of the user's own (``.yaml``). Raises ConfigError
    if there is none, or it is not one.
    """
    own = name.endswith(".yaml")
    if not own and name not in names():
        raise ConfigError(
            f"experiment={name}: no such experiment{did_you_mean(name, names())} (there are {', '.join(names())})"
        )
    try:
        file = Path(name) if own else files("nmrun.conf") / "experiment" / f"{name}.yaml"
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"experiment={name}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"experiment={name}: not YAML: {' '.join(str(error).split())}") from None
    try:
        return _read(Path(name).stem, content)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"experiment={name}: {error}") from None


def _read(name: str, content: dict[str, Any]) -> Experiment:
    missing = sorted({"title", "source", "sweep", "scales"} - content.keys())
    unknown = sorted(content.keys() - KEYS) + [
        f"report.{key}" for key in sorted(content.get("report", {}).keys() - REPORT.keys())
    ]
    if missing or unknown:
        raise ValueError(
            f"without {', '.join(missing)}"
            if missing
            else f"{unknown[0]}: no such key{did_you_mean(unknown[0], KEYS)}"
        )
    for figure in content.get("report", {}).get("figures", []):
        kind = figure.partition(" ")[0]
        if kind not in FIGURES:
            raise ValueError(
                f"report.figures: {kind}: no such kind{did_you_mean(kind, FIGURES)} (there are {', '.join(FIGURES)})"
            )
    if set(content["scales"]) - set(SCALES):
        raise ValueError(f"scales: they are called {', '.join(SCALES)}")
    paper, sweep = content.get("paper") or {"source": "", "values": {}}, content["sweep"]
    return Experiment(
        name=name,
        title=content["title"],
        source=content["source"],
        note=content.get("note", ""),
        sweeps=[sweep] if isinstance(sweep, str) else sweep,
        scales=content["scales"],
        **{**REPORT, **content.get("report", {})},
        paper={
            row: {column: str(value) for column, value in cells.items()}
            for row, cells in paper["values"].items()
        },
        paper_source=paper["source"],
    )


def expand(words: Sequence[str], multirun: bool) -> list[list[str]]:
    """The overrides of a command line with ``experiment=NAME`` (several by commas, or all) and
    ``scale=SCALE`` (default small) replaced by what they stand for, and those with ``zip=KEY,KEY``
    by the rows of it (see :mod:`nmrun.config.zipped`): the sweeps to be run one after the other.
    Without either, the words as they are.

    Raises ConfigError for an unknown experiment or scale, for what cannot be zipped, and for either
    without ``-m``.
    """
    asked = {zipped.key(word): word.partition("=")[2] for word in words}
    if "zip" in asked and not multirun:
        raise ConfigError(f"zip={asked['zip']}: several values make a sweep; add -m")
    if "experiment" not in asked:
        if "scale" in asked:
            raise ConfigError(
                f"scale={asked['scale']}: of which experiment? Add experiment=NAME (there are {', '.join(names())})"
            )
        return zipped.rows(words)
    own = [word for word in words if zipped.key(word) not in ("experiment", "scale")]
    found = [
        each.overrides(asked.get("scale", "small"), own) for each in chosen(asked["experiment"])
    ]
    if not multirun:
        raise ConfigError(f"experiment={asked['experiment']} is a sweep: add -m")
    return [sweep for sweeps in found for sweep in sweeps]


def configs(experiment: Experiment, scale: str, own: Sequence[str] = ()) -> list[Config]:
    """The checked config of every run of an experiment, each once. Raises ConfigError as the sweep
    itself would.

    The seeds of a job differ in nothing else, so that one composition is enough for all of them.
    """
    found: dict[str, Config] = {}
    source.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("nmrun.conf", version_base="1.3"):
        for words in experiment.overrides(scale, own):
            try:
                parsed = OverridesParser.create().parse_overrides(
                    [word for word in words if not word.startswith("hydra")]
                )
                jobs = BasicSweeper.split_arguments(
                    [o for o in parsed if o.key_or_group != "seed"], None
                )[0]
                seeds = [
                    job
                    for job in BasicSweeper.split_arguments(
                        [o for o in parsed if o.key_or_group == "seed"], None
                    )[0]
                    if job
                ]
                for job in jobs:
                    one = schema.check(compose("nmrun", [*job, *(seeds[0] if seeds else [])]))
                    for seed in [int(word[0].partition("=")[2]) for word in seeds] or [one.seed]:
                        config = Config({**one.plain, "seed": seed}, one.pattern)
                        found.setdefault(str(run_folder(config)), config)
            except HydraException as error:
                raise ConfigError(
                    f"experiment={experiment.name}: {str(error).splitlines()[0]}"
                ) from None
    return list(found.values())
