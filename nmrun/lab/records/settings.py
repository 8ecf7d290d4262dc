"""The settings of run folders, finished or not, without pandas; and ``nmrun compare RUN RUN``, the
settings in which runs differ and their metrics, side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError, RunError
from nmrun.lab.arguments import Parser
from nmrun.lab.config.identity import OF_COMMAND
from nmrun.lab.keys.config import flatten
from nmrun.lab.output import aligned
from nmrun.lab.runs.run_folder import RESULT, RunFolder, metrics_of
from nmrun.patterns import RATIO_KEYS, written
from nmrun.ranges import value_text


def of(run: RunFolder) -> dict[str, str]:
    """The settings of a run by key: groups by their name (``recipe``), ``sparsity`` as ``2:4`` or
    ``dense``, all else by its dotted key. ConfigError where the folder is no run's."""
    config = run.config
    if "sparsity" not in config:
        there = "no run is in it" if run.path.exists() else "there is no such folder"
        raise ConfigError(f"{run.path}: {there}")
    named = {key: value.get("name") for key, value in config.items() if isinstance(value, dict)}
    flat = {
        **{key: name for key, name in named.items() if name is not None},
        "sparsity": written(config["sparsity"]),
        **{key: value for key, value in flatten(config).items() if key[-5:] != ".name"},
    }
    return {key: value_text(value) for key, value in flat.items() if key not in RATIO_KEYS}


# --- nmrun compare --------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="nmrun compare",
        description="The settings in which runs differ and their metrics, side by side.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("others", nargs="+", type=Path, metavar="RUN", help="more of them")
    parser.add_argument("--all", action="store_true", help="settings that are the same as well")
    options = parser.parse_intermixed_args(argv)
    runs = [RunFolder(path) for path in (options.run, *options.others)]
    if wrong := [f"{run.path / RESULT}: {run.problem}" for run in runs if run.problem]:
        raise RunError("; ".join(wrong))
    print("\n".join(lines(runs, options.all)))
    return 0


def lines(runs: Sequence[RunFolder], every: bool) -> list[str]:
    """A line for each folder, setting and metric; with two runs, metrics have their difference
    beside them."""
    differing = [
        [key, *("-" if value is None else value for value in values)]
        for key, values in _side_by_side(map(of, runs))
        if key not in OF_COMMAND and (every or len(set(values)) > 1)
    ]
    same = ["the same settings", *["" for _ in runs]]
    status = ["status", *(run.result.get("status", "no result") for run in runs)]
    results = [{**metrics_of(run.result), "seconds": run.result.get("seconds")} for run in runs]
    metrics = []
    for key, values in _side_by_side(results):
        numbers = [value for value in values if isinstance(value, int | float)]
        texts = [f"{value:.6g}" if value in numbers else "-" for value in values]
        both = [f"{numbers[1] - numbers[0]:+.4g}"] if len(numbers) == len(values) == 2 else []
        metrics += [[key, *texts, *both]] if numbers else []
    heads = [f"[{number}]" for number in range(1, len(runs) + 1)]
    names = [f"{head} {run.path}" for head, run in zip(heads, runs, strict=True)]
    return [*names, "", *aligned([["", *heads], *(differing or [same]), status, *metrics])]


def _side_by_side(columns: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The keys of any column, each with its values; None where there is none."""
    every = list(columns)
    keys = dict.fromkeys(key for column in every for key in column)
    return [(key, [column.get(key) for column in every]) for key in keys]
