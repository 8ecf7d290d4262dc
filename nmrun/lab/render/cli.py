"""``nmrun table``, ``nmrun plot`` and ``nmrun report``."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun import atomic
from nmrun.errors import ConfigError, folded, neutral
from nmrun.lab.arguments import Parser, files_of_the_command
from nmrun.registry import choose

if TYPE_CHECKING:
    from nmrun.lab.compare.comparison import Comparison, Query

OUTPUTS = "outputs"  # where runs are by default
RECORDS = ("csv", "json")  # for programs
FORMATS = ("markdown", "latex", *RECORDS)
BY_SUFFIX = {".md": "markdown", ".tex": "latex"} | {f".{name}": name for name in RECORDS}
PICTURES = {f".{kind}": kind for kind in ("png", "svg", "pdf")}
PLOTS = ("ratio", "curves", "flops", "overall")
OVER = ("step", "epoch", "seconds")
QUERY = ("rows", "cols", "metric", "filter")  # options of all three
EITHER = {"paths", *QUERY, "baseline", "format", "out", "verify"}
# the options of nmrun table, by what it shows
SHOWS = {
    "runs": {"runs", "paths", "filter", "format", "out", "verify"},
    "experiment": {"experiment", "scale", "figures"} | EITHER,
    "": {"overall", "bib"} | EITHER,
}


def table(argv: Sequence[str]) -> int:
    """``nmrun table [PATH...]``: print or write the comparison of the runs below the paths."""
    parser = table_parser()
    with files_of_the_command():
        options = parser.parse_intermixed_args(argv)
        usual = "csv" if options.runs else "markdown"
        style = options.format or _by_suffix(options.out, BY_SUFFIX | {"": usual})
        given = {key for key, value in vars(options).items() if value != parser.get_default(key)}
        shown = next((name for name in SHOWS if name in given), "")
        if wrong := sorted(given - SHOWS[shown]):
            what = f"with --{shown}" if shown else "without --experiment"
            raise ConfigError(f"--{wrong[0]}: it has no meaning {what}")
        if options.runs:
            _write(_each_run(options, choose("format", style, RECORDS)), style, options.out)
        elif options.experiment:
            _experiments(options, style)
        else:
            command = shlex.join(["nmrun", "table", *argv])
            _write(_cells(options, style, command), style, options.out)
    return 0


def table_parser() -> Parser:
    """Of the words after ``nmrun table``."""
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
    _baseline(parser, "such as dense")
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
    return parser


def _each_run(options: Namespace, style: str) -> str:
    """A line for each run, with all settings: a table of several files has to know in what their
    runs differ."""
    from nmrun.lab.compare.runs import as_lines, as_text, filtered, read_runs, to_csv, verify

    selection = filtered(read_runs(_paths(options), options.verify), options.filter)
    if options.verify:
        verify(selection)
    return to_csv(selection) if style == "csv" else as_text(as_lines(selection), style)


def _experiments(options: Namespace, style: str) -> None:
    """Write the tables of experiments, and their figures."""
    from nmrun.lab.config import experiment
    from nmrun.lab.render import experiments

    every, scale = experiment.selection(options.experiment), options.scale or "small"
    if style in RECORDS and len(every) > 1:
        raise ConfigError(f"--format {style}: one experiment at a time")
    asked = {key: getattr(options, key) for key in (*QUERY, "baseline")}
    sections = experiments.sections(every, scale, options.paths, asked, options.verify)
    _write(experiments.render(sections, style), style, options.out)
    for file in experiments.draw(sections, options.figures) if options.figures else []:
        print(file)


def _cells(options: Namespace, style: str, command: str) -> str:
    """The tables of a query; ``command`` stands above LaTeX."""
    from nmrun.lab.render import formats

    comparison = compared(options)
    if options.bib:
        atomic.write(options.bib, formats.bibtex(comparison.tables))
    made = formats.provenance(command, comparison.tables) if style == "latex" else ""
    return made + formats.render(comparison, style)


def compared(options: Namespace) -> Comparison:
    """What the words after ``nmrun table`` ask for."""
    from nmrun.lab.compare.comparison import compare
    from nmrun.lab.compare.runs import read_runs

    query, intact = _query(options, options.overall), options.verify
    return compare(read_runs(_paths(options), intact), query, intact)


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
    print(out)


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
        type=float,
        metavar="INCHES",
        help="3.25 fits one of two columns; fonts keep their size",
    )
    _baseline(parser, "for --kind overall, such as dense")
    parser.add_argument(
        "--ylim", type=limits, metavar="LOW,HIGH", help="limits of the y axis, such as 90,100"
    )
    parser.add_argument(
        "--x", choices=OVER, default="step", help="what curves are drawn against (default: step)"
    )
    with files_of_the_command():
        options = parser.parse_intermixed_args(argv)
        name = "plot.png" if options.kind == "ratio" else f"{options.kind}.png"
        out = options.out or _default_file(options, name)
        _by_suffix(out, PICTURES)
        from nmrun.lab.compare.runs import read_runs
        from nmrun.lab.render import plots
        from nmrun.lab.render.style import Layout, save

        query = _query(options, overall=options.kind == "overall")
        layout = Layout(options.title, options.width, options.ylim, options.x)
        figures = plots.plot(read_runs(_paths(options)), query, options.kind, layout)
        for i, figure in enumerate(figures):
            target = out if len(figures) == 1 else out.with_stem(f"{out.stem}-{i + 1}")
            save(figure, target)
            print(target)
    return 0


def limits(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def report(argv: Sequence[str]) -> int:
    """``nmrun report [PATH...]``: tables, pictures, failures, settings and environments on one page."""
    parser = _parser(
        "report",
        "Write one HTML file about the runs below PATH: tables, pictures, failures, settings.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: PATH/report.html")
    _baseline(parser, "default dense, where it is there")
    with files_of_the_command():
        options = parser.parse_intermixed_args(argv)
        target = options.out or _default_file(options, "report.html")
        _by_suffix(target, {".html": "HTML", ".htm": "HTML", "": "HTML"})
        from nmrun.lab.render import report

        report.write(_paths(options), _query(options), target)
        print(target)
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


def _baseline(parser: Parser, which: str) -> None:
    parser.add_argument(
        "--baseline",
        metavar="ROW",
        help=f"compare every row with this one, seed by seed ({which})",
    )


def _paths(options: Namespace) -> list[str]:
    return options.paths or [OUTPUTS]


def _by_suffix(out: Path | None, kinds: Mapping[str, str]) -> str:
    """The kind of file that a name asks for."""
    suffix = out.suffix.lower() if out else ""
    if suffix not in kinds:
        raise ConfigError(
            f"--out {out}: the suffix must be one of {', '.join(filter(None, kinds))}"
        )
    return kinds[suffix]


def _query(options: Namespace, overall: bool = False) -> Query:
    from nmrun.lab.compare.comparison import Query

    asked = {key: getattr(options, key) for key in QUERY}
    return Query.of(**asked, baseline=options.baseline, overall=overall)


def _default_file(options: Namespace, name: str) -> Path:
    """The default place of a file about runs: their folder, or the current one if they are in none."""
    folder = _paths(options)[0]
    return Path(folder if Path(folder).is_dir() else ".", name)


def _print(text: str) -> None:
    """Print a text without control characters, with hyphens if the terminal has no minus sign."""
    text = neutral(text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        from nmrun.lab.compare.notation import MINUS

        text = text.replace(MINUS, "-")
    sys.stdout.write(text)
