"""``nmrun table`` and ``nmrun plot``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun.errors import ConfigError

if TYPE_CHECKING:
    from nmrun.report.tables import Table


def table(argv: Sequence[str]) -> int:
    """``nmrun table PATH...``: print or write the comparison of the runs below the paths; returns the exit status."""
    parser = _parser("table", "Compare the runs below PATH: mean +- standard deviation over seeds.")
    parser.add_argument("--format", default="markdown", choices=("markdown", "latex", "csv", "html"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to FILE instead of the terminal")
    options = parser.parse_args(argv)
    try:
        from nmrun.report.tables import render

        text = "\n".join(render(each, options.format) for each in _tables(options))
        if options.out is None:
            print(text, end="")
        else:
            options.out.write_text(text)
            print(options.out)
    except ConfigError as error:
        return _refuse("table", error)
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:
        return _refuse("table", ConfigError(f"{error.filename}: {error.strerror}"))
    return 0


def plot(argv: Sequence[str]) -> int:
    """``nmrun plot PATH...``: draw the same comparison; returns the exit status."""
    parser = _parser("plot", "Draw the runs below PATH: the metric against the ratio, one line a recipe.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="PNG, SVG or PDF by suffix (default PATH/plot.png)")
    options = parser.parse_args(argv)
    out = options.out or options.paths[0] / "plot.png"
    try:
        if out.suffix not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--out {out}: the suffix must be .png, .svg or .pdf")
        tables = _tables(options)
        from nmrun.report.plots import plot as draw

        for i, each in enumerate(tables):
            target = out if len(tables) == 1 else out.with_stem(f"{out.stem}-{i + 1}")
            draw(each, target)
            print(target)
    except ConfigError as error:
        return _refuse("plot", error)
    except OSError as error:
        return _refuse("plot", ConfigError(f"{error.filename}: {error.strerror}"))
    return 0


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"nmrun {verb}", description=description)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders with runs in them, such as outputs/digits")
    parser.add_argument(
        "--rows", default="recipe", metavar="KEYS", help="config keys, with commas between them (default recipe)"
    )
    parser.add_argument("--cols", default="sparsity", metavar="KEYS", help="likewise (default sparsity)")
    parser.add_argument(
        "--metric",
        default="test/accuracy",
        help="a metric of result.json (default test/accuracy; best/... for the best weights)",
    )
    parser.add_argument("--filter", nargs="*", default=[], metavar="KEY=VALUE", help="only runs whose config says so")
    return parser


def _tables(options: argparse.Namespace) -> list[Table]:
    from nmrun.report.collect import collect
    from nmrun.report.tables import build

    for path in options.paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such folder")
    runs, unreadable = collect(options.paths)
    for line in unreadable:
        print(f"nmrun: {line}", file=sys.stderr)
    if runs.empty:
        raise ConfigError(f"no run below {', '.join(map(str, options.paths))} (a run's folder holds result.json)")
    keys = [c for c in runs.columns if "/" not in c]
    rows, columns = options.rows.split(","), options.cols.split(",")
    for key in [*rows, *columns, *(f.partition("=")[0] for f in options.filter)]:
        _known(key, keys, "key")
    _known(options.metric, [c for c in runs.columns if "/" in c], "metric")
    for condition in options.filter:
        key, _, value = condition.partition("=")
        runs = runs[runs[key].astype(str) == value]
        if runs.empty:
            raise ConfigError(f"--filter {condition} leaves no run")
    groups = [k for k in ("dataset", "model") if k not in (*rows, *columns)]
    parts = [part for _, part in runs.groupby(groups)] if groups else [runs]
    return [build(part, options.metric, rows, columns) for part in parts]


def _known(name: str, names: Sequence[str], what: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no {what} {name!r} in these runs; {hint}There are {', '.join(sorted(names))}")


def _refuse(verb: str, error: ConfigError) -> int:
    for problem in error.problems:
        print(f"nmrun {verb}: {problem}", file=sys.stderr)
    return 2
