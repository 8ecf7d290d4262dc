"""The settings of run folders, finished or not, without pandas; and ``nmrun compare RUN RUN``, the
settings in which runs differ and their metrics, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError, RunError
from nmrun.lab.arguments import Parser
from nmrun.lab.config.identity import OF_COMMAND
from nmrun.lab.keys.config import flatten
from nmrun.lab.output import aligned
from nmrun.lab.runs.run_folder import CONFIG, RESULT, RunFolder, metrics_of, walk
from nmrun.patterns import RATIO_KEYS, written
from nmrun.ranges import value_text


def read(folder: Path) -> dict[str, str]:
    """The settings of a run by key: groups by their name (``recipe``), ``sparsity`` as ``2:4`` or
    ``dense``, all else by its dotted key. ConfigError where the folder is no run's."""
    return of(RunFolder(folder))


def of(run: RunFolder) -> dict[str, str]:
    """Likewise, for an open folder."""
    config, folder = run.config, run.path
    if not config or "sparsity" not in config:
        there = "it is a file; name a run folder" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{folder}: {'no run is in it' if folder.is_dir() else there}")
    named = {key: value.get("name") for key, value in config.items() if isinstance(value, dict)}
    flat = {
        **{key: name for key, name in named.items() if name is not None},
        "sparsity": written(config["sparsity"]),
        **{key: value for key, value in flatten(config).items() if key[-5:] != ".name"},
    }
    return {key: value_text(value) for key, value in flat.items() if key not in RATIO_KEYS}


def only_run(path: Path) -> Path:
    """The run's folder at a path, or the only one below it. ConfigError where there are several."""
    if not path.is_dir() or RunFolder(path).config:
        return path
    below = [
        Path(place)
        for place, _, files in walk(path, lambda _: None)
        if CONFIG in files and "sparsity" in RunFolder(place).config
    ]
    if len(below) > 1:
        raise ConfigError(f"{path}: name one of the runs below it; nmrun status {path} lists them")
    return below[0] if below else path


# --- nmrun compare --------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="nmrun compare",
        description="The settings in which runs differ and their metrics, side by side.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, two or more"
    )
    parser.add_argument("--all", action="store_true", help="settings that are the same as well")
    options = parser.parse_intermixed_args(argv)
    if len(options.runs) < 2:
        raise ConfigError("the following arguments are required: a second RUN")
    print("\n".join(lines([only_run(run) for run in options.runs], options.all)))
    return 0


def lines(folders: Sequence[Path], every: bool = False) -> list[str]:
    """A line for each folder, setting and metric; with two runs, metrics have their difference
    beside them."""
    runs = [RunFolder(folder) for folder in folders]
    if wrong := [f"{run.path / RESULT}: {run.problem}" for run in runs if run.problem]:
        raise RunError("; ".join(wrong))
    configs = [read(folder) for folder in folders]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [["", *(f"[{number}]" for number in range(1, len(folders) + 1))]]
    for key in keys:
        values = [config.get(key, "-") for config in configs]
        if key not in OF_COMMAND and (every or len(set(values)) > 1):
            rows.append([key, *values])
    if len(rows) == 1:
        rows.append(["the same settings", *["" for _ in folders]])
    results = [run.result for run in runs]
    rows.append(["status", *(str(result.get("status", "no result")) for result in results)])
    rows += _metrics([_numbers(result) for result in results])
    names = [f"[{number}] {folder}" for number, folder in enumerate(folders, 1)]
    return [*names, "", *aligned(rows)]


def _metrics(runs: Sequence[dict[str, float]]) -> list[list[str]]:
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run.get(key) for run in runs]
        row = [key, *("-" if value is None else f"{value:.6g}" for value in values)]
        if len(values) == 2 and None not in values:
            row.append(f"{values[1] - values[0]:+.4g}")  # type: ignore[operator]
        rows.append(row)
    return rows


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    every = {**metrics_of(result), "seconds": result.get("seconds")}
    return {key: value for key, value in every.items() if isinstance(value, int | float)}
