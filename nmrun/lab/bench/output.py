"""What the benchmarks share towards the user: options, tables, and how results are written."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from nmrun.errors import ConfigError
from nmrun.fast import acceleration
from nmrun.lab.bench.machine import hardware, machine_line
from nmrun.lab.bench.timing import Row
from nmrun.lab.show.markdown import table

T = TypeVar("T")


def begin(options: argparse.Namespace) -> torch.device:
    """Choose the device that was asked for.

    Raises:
        ConfigError: for a device that is not there.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    return torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")


def needs_products(device: torch.device) -> None:
    """Raise ConfigError where this device has no 2:4 products."""
    if why := acceleration.obstacle(device):
        raise ConfigError(f"{why}: there are no 2:4 products to measure")


def note(text: str) -> None:
    print(f"measuring {text} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def reported(report: Callable[[list[T]], object]) -> Iterator[list[T]]:
    """Collect rows, and report those that are there at the end, also where an error or Ctrl-C is
    the end.
    """
    rows: list[T] = []
    try:
        yield rows
    finally:
        if rows:
            report(rows)


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
) -> None:  # fmt: skip
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


def _plain(row: Row) -> Row:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
        for key, value in row.items()
    }
