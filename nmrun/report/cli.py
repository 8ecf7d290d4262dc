"""``nmrun table`` and ``nmrun plot``."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nmrun.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from nmrun.report.tables import Table

TESTS = ("t", "wilcoxon")
FORMATS = ("markdown", "latex", "csv", "html")
SUFFIXES = (".png", ".svg", ".pdf")


def table(argv: Sequence[str]) -> int:
    """``nmrun table PATH...``: print or write the comparison of the runs below the paths; returns the exit status."""
    parser = _parser("table", "Compare the runs below PATH: mean +- standard deviation over seeds.")
    parser.add_argument("--format", default="markdown", choices=FORMATS, help="default markdown; csv is one line a cell")
    parser.add_argument(
        "--show",
        default="mean",
        choices=("mean", "median", "best"),
        help="what stands in a cell (default mean, with deviation)",
    )
    parser.add_argument("--baseline", metavar="ROW", help="compare every row with this one, such as dense, seed by seed")
    parser.add_argument("--test", default="t", choices=TESTS, help="paired test of the comparison (default t)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to FILE instead of the terminal")
    try:
        options = parser.parse_args(argv)
        tables = _tables(options, options.show)
        if options.baseline:
            from nmrun.report.tables import compare

            tables = [compare(each, options.baseline, options.test) for each in tables]
        from nmrun.report.formats import render

        text = render(tables, options.format)
        if options.out is None:
            _say(text)
        else:
            options.out.write_text(text, encoding="utf-8")
            _say(f"{options.out}\n")
    except (ConfigError, OSError) as error:
        return _refuse("table", error)
    return 0


def plot(argv: Sequence[str]) -> int:
    """``nmrun plot PATH...``: draw the same comparison; returns the exit status."""
    parser = _parser("plot", "Draw the runs below PATH: the metric against the ratio, one line a recipe.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="PNG, SVG or PDF by suffix (default PATH/plot.png)")
    try:
        options = parser.parse_args(argv)
        out = options.out or Path(options.paths[0] if Path(options.paths[0]).is_dir() else ".", "plot.png")
        if out.suffix not in SUFFIXES:
            raise ConfigError(f"--out {out}: the suffix must be one of {', '.join(SUFFIXES)}")
        tables = _tables(options)
        from nmrun.report.plots import plot as draw

        for i, each in enumerate(tables):
            target = out if len(tables) == 1 else out.with_stem(f"{out.stem}-{i + 1}")
            draw(each, target)
            _say(f"{target}\n")
    except (ConfigError, OSError) as error:
        return _refuse("plot", error)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"nmrun {verb}", description=description)
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="folders with runs in them, such as outputs/digits, or wandb://entity/project"
    )
    parser.add_argument(
        "--rows", default="recipe", metavar="KEYS", help="config keys, such as recipe,optimizer.lr (default recipe)"
    )
    parser.add_argument("--cols", default="sparsity", metavar="KEYS", help="likewise (default sparsity)")
    parser.add_argument(
        "--metric",
        help="default that of the task, such as test/accuracy; best/... is of the best weights; several by commas with --cols metric",
    )
    parser.add_argument(
        "--filter",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="leave out runs where KEY has another value",
    )
    return parser


def _tables(options: argparse.Namespace, statistic: str = "mean") -> list[Table]:
    """One table for each data set and model, unless a row or column tells them apart."""
    from nmrun.report.collect import WANDB, collect

    for path in options.paths:
        if not path.startswith(WANDB) and not Path(path).is_dir():
            raise ConfigError(f"{path}: no such folder")
    for condition in options.filter:
        if "=" not in condition:
            raise ConfigError(
                f"--filter {condition}: write KEY=VALUE, such as optimizer.lr=0.001 (folders come before --filter)"
            )
    from nmrun.report.tables import build

    runs = collect(options.paths)
    if runs.empty:
        raise ConfigError(f"no run below {', '.join(options.paths)} (a run's folder holds result.json)")
    metrics = [c for c in runs.columns if "/" in c] + ["seconds"]
    keys = [c for c in runs.columns if c not in metrics]
    rows, columns = options.rows.split(","), options.cols.split(",")
    for key in [*rows, *columns, *(condition.partition("=")[0] for condition in options.filter)]:
        _known(key, keys, "key")
    if (runs["status"] == "finished").any():  # else there are no metrics to know, but failures to show
        for metric in (options.metric or metrics[0]).split(","):
            _known(metric, metrics, "metric")
    if "," in (options.metric or "") and "metric" not in (*rows, *columns):
        raise ConfigError(
            f"--metric {options.metric}: several metrics need a place: --cols metric, say, with --rows recipe,sparsity"
        )
    for condition in options.filter:
        runs = _filtered(runs, condition)
    groups = [key for key in ("dataset", "model") if key not in (*rows, *columns)]
    parts = [part for _, part in runs.groupby(groups)] if groups else [runs]
    return [build(part, options.metric or _metric(part), rows, columns, statistic) for part in parts]


def _metric(runs: pd.DataFrame) -> str:
    """That of the runs' task on the test split; runs that did not finish do not say."""
    own = runs["metric"].dropna()
    return f"test/{own.iloc[0]}" if len(own) else "test/accuracy"


def _filtered(runs: pd.DataFrame, condition: str) -> pd.DataFrame:
    """The runs whose key has this value, and those without that key (an STE run has no ``recipe.switch`` to differ in)."""
    from nmrun.report.tables import label

    key, _, wanted = condition.partition("=")
    labels = runs[key].map(label)
    chosen = labels.map(lambda text: _same(text, wanted.replace(" ", "")))
    if not chosen.any():
        there = ", ".join(sorted(set(labels) - {"-"}))
        raise ConfigError(f"--filter {condition} leaves no run; {key} is {there}")
    return runs[chosen | (labels == "-")]


def _same(a: str, b: str) -> bool:
    try:
        return a == b or float(a) == float(b)
    except ValueError:
        return False


def _known(name: str, names: Sequence[str], what: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        family = [n for n in names if n.partition(".")[0] == name.partition(".")[0]] or [n for n in names if "." not in n]
        raise ConfigError(f"no {what} {name!r} in these runs; {hint}there are {', '.join(sorted(family))}")


def _say(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(verb: str, error: ConfigError | OSError) -> int:
    known = [error.filename, error.strerror] if isinstance(error, OSError) else [error]
    message = ": ".join(str(each) for each in known if each)
    print(f"nmrun {verb}: {message}", file=sys.stderr)
    return 2
