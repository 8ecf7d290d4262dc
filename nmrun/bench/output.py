"""What the benchmarks share towards the user: options, tables, and how results are written."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nmrun.bench.machine import hardware, machine_line
from nmrun.bench.timing import Row
from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError
from nmrun.products import acceleration
from nmrun.report.markdown import table
from nmrun.verbs import Parser


def parser(name: str, about: str | None, default_rounds: int) -> Parser:
    """Make a parser with what all benchmarks take: rounds, device and where the results go.

    Args:
        name: of the benchmark.
        about: its module's docstring, whose first paragraph is shown.
        default_rounds: measurements of each arm.
    """
    text = (about or "").split("\n\n")[0].replace("``", "")
    made = Parser(prog=f"nmrun bench {name}", description=text)
    made.add_argument(
        "--rounds",
        type=positive,
        default=default_rounds,
        help=f"measurements of each (default: {default_rounds})",
    )
    made.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: a GPU where there is one",
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"write {name}_cpu or {name}_gpu there, as .md and .json",
    )
    return made


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number, 1 or more")
    return int(text)


def pattern(text: str) -> Pattern:
    """N:M, for argparse."""
    try:
        return Pattern.parse(text)
    except PatternError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shape(text: str) -> tuple[int, int]:
    """``768x3072``, inputs and outputs of a layer, for argparse."""
    sides = text.split("x")
    if len(sides) != 2 or not all(
        side.isdecimal() and int(side) > 0 and int(side) % 16 == 0 for side in sides
    ):
        raise argparse.ArgumentTypeError(
            f"{text}: inputs x outputs, multiples of 16, such as 768x3072"
        )
    return int(sides[0]), int(sides[1])


def begin(options: argparse.Namespace, made: Parser) -> torch.device:
    """Choose the device that was asked for, and make the folder of the results.

    Args:
        options: as parsed.
        made: the parser, which tells mistakes.

    Raises:
        ConfigError: for a device that is not there, and a folder that cannot be made.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("--device cuda: torch sees no CUDA device here")
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            made.error(f"--out {options.out}: {error.strerror}")
    return torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")


def needs_products(device: torch.device) -> None:
    """Raise ConfigError where this device has no 2:4 products."""
    if why := acceleration.obstacle(device):
        raise ConfigError(f"{why}: there are no 2:4 products to measure")


def note(text: str) -> None:
    print(f"measuring {text} ...", file=sys.stderr, flush=True)


def spread(row: Row, name: str) -> str:
    """Write a median and its quartiles: ``1.32 [1.30, 1.35]``.

    Args:
        row: has ``name``, ``name_q1`` and ``name_q3``.
        name: the key of the median.
    """
    middle, q1, q3 = (f"{row[key]:#.3g}".rstrip(".") for key in (name, f"{name}_q1", f"{name}_q3"))
    return f"{middle} [{q1}, {q3}]"


def grid(rows: Sequence[Row], down: str, across: str, cell: Callable[[Row], str]) -> str:
    """Make a table of rows.

    Args:
        rows: what was measured.
        down, across: keys whose values are the table's rows and columns.
        cell: writes a row's cell.

    Returns:
        Markdown.
    """
    columns = list(dict.fromkeys(row[across] for row in rows))
    cells = {
        (row[down], row[across]): row["wrong"] if row.get("wrong") else cell(row) for row in rows
    }
    lines = [
        [str(d), *(cells.get((d, a), "") for a in columns)]
        for d in dict.fromkeys(row[down] for row in rows)
    ]
    return table([down, *map(str, columns)], lines)


def finish(
    name: str, text: str, rows: Sequence[Row], argv: Sequence[str], device: torch.device, out: Path | None,
    picture: Callable[[Path], None] | None = None, variant: str = "",
) -> int:  # fmt: skip
    """Print the results, and write them where that was asked for.

    Args:
        name: of the benchmark.
        text: the tables.
        rows: what was measured.
        argv: the command's words.
        device: where it was measured.
        out: the folder; None: nothing is written.
        picture: draws into a file.
        variant: follows the name in the files' names.

    Returns:
        The exit status.
    """
    machine, command = hardware(device), shlex.join(["nmrun", "bench", name, *argv])
    page = f"{text}\n\n{machine_line(machine)}\n\n    {command}"
    print(page)
    if out:
        stem = f"{name}{variant}_{'gpu' if device.type == 'cuda' else 'cpu'}"
        record = {
            "benchmark": name,
            "command": command,
            "hardware": machine,
            "rows": [_plain(row) for row in rows],
        }
        (out / f"{stem}.md").write_text(page + "\n")
        (out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
        if picture is not None:
            picture(out / f"{stem}.png")
    return 0


def _plain(row: Row) -> Row:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
        for key, value in row.items()
    }
