"""``nmrun table``, ``nmrun plot`` and ``nmrun report``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun import atomic
from nmrun.errors import ConfigError, folded, neutral, raise_all
from nmrun.lab.arguments import Parser, files_of_the_command, in_range
from nmrun.lab.keys.ranges import INCHES, LIMITS
from nmrun.ranges import whole

if TYPE_CHECKING:
    from nmrun.lab.compare.comparison import Query

OUTPUTS = "outputs"  # where runs are by default
RECORDS = ("csv", "json")  # for programs
FORMATS = ("markdown", "latex", *RECORDS)
BY_SUFFIX = {".md": "markdown", ".tex": "latex"} | {f".{name}": name for name in RECORDS}
SUFFIXES = (".png", ".svg", ".pdf")
PLOTS = ("ratio", "curves", "flops", "overall")


def table(argv: Sequence[str]) -> int:
    """``nmrun table [PATH...]``: print or write the comparison of the runs below the paths."""
    parser = _parser("table", "Compare the runs below PATH: mean +- standard deviation over seeds.")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="default: by the suffix of --out, else markdown. csv and json have a line for each cell",
    )
    parser.add_argument(
        "--runs",
        action="store_true",
        help="a line for each run instead, as csv (default) or json",
    )
    _labels(parser, "names in LaTeX")
    parser.add_argument(
        "--show",
        default="mean",
        choices=("mean", "median", "best"),
        help="what a cell shows (default: mean, with standard deviation)",
    )
    parser.add_argument(
        "--digits",
        type=in_range(int, whole(0, 12)),
        metavar="N",
        help="digits after the point (default: as many as the deviation leaves)",
    )
    parser.add_argument(
        "--method",
        action="store_true",
        help="explain below each table how its numbers are computed",
    )
    _comparison(parser, "such as dense")
    parser.add_argument(
        "--overall",
        action="store_true",
        help="one difference for each row and data set, over all its cells",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write to FILE instead of the terminal"
    )
    parser.add_argument(
        "--bib",
        type=Path,
        metavar="FILE",
        help="write whom to cite to FILE, as BibTeX: for recipes, data sets, metrics and tests",
    )
    parser.add_argument(
        "--experiment",
        metavar="NAMES",
        help="show the runs, rows, columns and published figures of these experiments (by commas, or all). Other words are "
        "overrides, as for the sweep",
    )
    parser.add_argument("--scale", help="scale of the experiments: smoke, small (default) or paper")
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="folder for the experiments' figures, as PNG"
    )
    parser.add_argument(
        "--verify", action="store_true", help="refuse runs whose files changed after they finished"
    )
    with files_of_the_command():
        options = parser.parse_intermixed_args(argv)
        raise_all(_unfit(options))
        if options.experiment:
            return _experiments(options)
        _write(_content(options, argv), _format(options), options.out)
    return 0


def _format(options: argparse.Namespace) -> str:
    suffix = "" if options.out is None else options.out.suffix.lower()
    otherwise = "csv" if options.runs else "markdown"
    return str(options.format or BY_SUFFIX.get(suffix, otherwise))


def _unfit(options: argparse.Namespace) -> Iterator[str]:
    """What of the words of ``nmrun table`` does not go together."""
    style, out = _format(options), options.out
    if out is not None and not options.format and out.suffix.lower() not in ("", *BY_SUFFIX):
        where = "; nmrun report writes HTML" if out.suffix.lower() in (".html", ".htm") else ""
        yield f"--out {out}: the suffix must be one of {', '.join(BY_SUFFIX)}, or say --format{where}"
    if options.experiment:
        if options.runs or options.overall or options.labels or options.bib:
            yield "--experiment: --runs, --overall, --labels and --bib are for folders"
        for word in options.paths:
            if "=" not in word:
                yield f"{word}: beside --experiment stand overrides; runs in a folder are output_dir={word}"
        if style in RECORDS and (options.experiment == "all" or "," in options.experiment):
            yield f"--format {style} --experiment {options.experiment}: one at a time"
        return
    for name in ("scale", "figures"):
        if vars(options)[name] is not None:
            yield f"--{name} is for --experiment"
    if options.labels and style != "latex":
        yield "--labels is for --format latex"
    if options.runs:
        if style not in RECORDS:
            yield f"--runs --format {style}: a line a run is {', '.join(RECORDS)}"
        of_cells = ("rows", "cols", "metric", "baseline", "overall", "digits", "method", "bib")
        allowed = "beside --runs stand --filter, --format, --out and --verify"
        for name in of_cells:
            if vars(options)[name] not in (None, False):
                yield f"--runs --{name}: it is for a table's cells; {allowed}"


def _content(options: argparse.Namespace, argv: Sequence[str]) -> str:
    from nmrun.lab.compare.runs import as_lines, as_text, filtered, read_runs, summary, verify

    style = _format(options)
    if options.runs:
        selection = filtered(read_runs(_paths(options), options.verify), options.filter)
        if options.verify:
            verify(selection)
        return as_text(as_lines(summary(selection)), style)
    query = _query(options, overall=options.overall)
    from nmrun.lab.compare.comparison import check_labels, compare
    from nmrun.lab.render import citations
    from nmrun.lab.render.formats import render

    labels = _names(options.labels)
    comparison = compare(read_runs(_paths(options), options.verify), query, options.verify)
    check_labels(comparison.tables, labels)
    if options.bib:
        atomic.write(options.bib, citations.bibtex(comparison.tables))
    content = render(comparison, style, labels, options.method)
    if style != "latex":
        return content
    command = shlex.join(["nmrun", "table", *argv])
    made = citations.provenance(command, comparison.tables)
    return "".join(f"% {' '.join(line.split())}\n" for line in made) + content


def _query(options: argparse.Namespace, **more: Any) -> Query:
    """The query of a command; no verb has all of the options."""
    from nmrun.lab.compare.comparison import Query, keys

    words = vars(options)
    return Query(
        rows=keys(options.rows),
        cols=keys(options.cols),
        metrics=keys(options.metric),
        filter=tuple(options.filter),
        statistic=words.get("show", "mean"),
        digits=words.get("digits"),
        baseline=options.baseline or "",
        **more,
    )


def _names(text: str | None) -> dict[str, str]:
    """The user's names for labels: ``step=Ours,dense=Dense``."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--labels {name}: write NAME=TEXT, such as sr_ste=SR-STE")
    return {name: written for name, _, written in pairs}


def _write(content: str, style: str, out: Path | None) -> None:
    """Write to a file, whose name is printed, or to the terminal, where captions are wrapped."""
    if out is None:
        lines = content.split("\n")
        if style == "markdown":
            lines = [line if line[:1] == "|" else folded(line, sys.stdout) for line in lines]
        _print("\n".join(lines))
        return
    if out.is_file() or not out.exists():
        atomic.write(out.resolve() if out.is_symlink() else out, content)
    else:  # a pipe, or /dev/stdout
        out.write_text(content, encoding="utf-8")
    sys.stdout.write(f"{out}\n")


def plot(argv: Sequence[str]) -> int:
    """``nmrun plot [PATH...]``: draw the same runs."""
    parser = _parser("plot", "Draw the runs below PATH, one line a recipe.")
    parser.add_argument(
        "--kind", default="ratio", choices=PLOTS, help="default: ratio, the metric against N:M"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="PNG, SVG or PDF by suffix (default: PATH/plot.png or PATH/KIND.png)",
    )
    parser.add_argument("--title", help="title (default: what all runs have in common; '': none)")
    parser.add_argument(
        "--width",
        type=in_range(float, INCHES),
        metavar="INCHES",
        help="3.25 fits one of two columns; fonts keep their size",
    )
    parser.add_argument(
        "--height",
        type=in_range(float, INCHES),
        metavar="INCHES",
        help="default: in proportion to --width, and what the axes need",
    )
    _labels(parser, "names in the picture")
    parser.add_argument(
        "--baseline", metavar="ROW", help="row to compare with in --kind overall, such as dense"
    )
    ends = in_range(lambda text: tuple(map(float, text.split(","))), LIMITS)
    text = "limits of the y axis, such as 90,100"
    parser.add_argument("--ylim", type=ends, metavar="LOW,HIGH", help=text)
    parser.add_argument(
        "--x",
        help="config key to draw the metric against, such as recipe.decay; curves take step (default), epoch or seconds",
    )
    with files_of_the_command():
        options = parser.parse_intermixed_args(argv)
        paths = _paths(options)
        name = "plot.png" if options.kind == "ratio" else f"{options.kind}.png"
        out = options.out or _default_file(paths, name)
        if out.suffix not in SUFFIXES:
            raise ConfigError(f"--out {out}: the suffix must be one of {', '.join(SUFFIXES)}")
        from nmrun.lab.compare.runs import read_runs
        from nmrun.lab.render import plots
        from nmrun.lab.render.style import Layout, save

        query, over = plots.along(options.x, options.kind, _query(options))
        layout = Layout(
            title=options.title,
            width=options.width,
            height=options.height,
            labels=_names(options.labels),
            ylim=options.ylim,
            x=over,
        )
        figures = plots.plot(read_runs(paths), query, options.kind, layout)
        for i, figure in enumerate(figures):
            target = out if len(figures) == 1 else out.with_stem(f"{out.stem}-{i + 1}")
            save(figure, target)
            sys.stdout.write(f"{target}\n")
    return 0


def report(argv: Sequence[str]) -> int:
    """``nmrun report [PATH...]``: tables, pictures, failures, configs and environments on one page."""
    parser = _parser(
        "report",
        "Write one HTML file about the runs below PATH: tables, pictures, failures, configurations.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: PATH/report.html")
    _comparison(parser, "default dense, where it is there")
    with files_of_the_command():
        options = parser.parse_intermixed_args(argv)
        paths = _paths(options)
        from nmrun.lab.render import report

        target = options.out or _default_file(paths, "report.html")
        if target.suffix not in ("", ".html", ".htm"):
            raise ConfigError(f"--out {target}: a report is HTML; the suffix must be .html")
        report.write(paths, _query(options), target)
        sys.stdout.write(f"{target}\n")
    return 0


def _parser(verb: str, description: str) -> Parser:
    parser = Parser(prog=f"nmrun {verb}", description=description)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help=f"folders with runs in them (default: {OUTPUTS})",
    )
    parser.add_argument(
        "--rows", metavar="KEYS", help="config keys, such as recipe,optimizer.lr (default: recipe)"
    )
    parser.add_argument("--cols", metavar="KEYS", help="config keys (default: sparsity)")
    parser.add_argument(
        "--metric",
        help="default: that of the task, such as test/accuracy. best/... is of the best weights. Several by commas with --cols metric",
    )
    parser.add_argument(
        "--filter",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="leave out runs in which KEY has another value; several values by commas: recipe=ste,sr_ste; KEY!=VALUE leaves out those that have it",
    )
    return parser


def _paths(options: argparse.Namespace) -> list[str]:
    for path in options.paths:
        name, equals, value = path.partition("=")
        if equals and name in vars(options):
            raise ConfigError(f"{path}: write --{name} {value}")
    return options.paths or [OUTPUTS]


def _default_file(paths: Sequence[str], name: str) -> Path:
    """The default place of a file about runs: their folder, or the current one if they are in none."""
    return Path(paths[0] if Path(paths[0]).is_dir() else ".", name)


def _comparison(parser: Parser, which: str) -> None:
    parser.add_argument(
        "--baseline",
        metavar="ROW",
        help=f"compare every row with this one, seed by seed ({which})",
    )


def _labels(parser: Parser, what: str) -> None:
    parser.add_argument(
        "--labels",
        metavar="NAME=TEXT,...",
        help=f"{what}, such as step=Ours (default: as papers write them)",
    )


def _experiments(options: argparse.Namespace) -> int:
    from nmrun.lab.config import experiment
    from nmrun.lab.render import experiments

    every, style = experiment.selection(options.experiment), _format(options)
    sections = experiments.sections(
        every, options.scale or "small", options.paths, _query(options), options.verify
    )
    text = experiments.render(sections, style, options.method)
    files = experiments.draw(sections, options.figures) if options.figures else []
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    _write(text, style, options.out)
    sys.stdout.write("".join(f"{file}\n" for file in files))
    return 0


def _print(text: str) -> None:
    """Print a text without control characters, with hyphens if the terminal has no minus sign."""
    text = neutral(text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        from nmrun.lab.compare.notation import MINUS

        text = text.replace(MINUS, "-")
    sys.stdout.write(text)
