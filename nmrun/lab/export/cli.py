"""``nmrun export RUN --out DIR [--format ...]``: a finished run's model, checked, in a format that
other programs read."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun import atomic
from nmrun.errors import ConfigError, RunError
from nmrun.lab import consent
from nmrun.lab.arguments import Parser
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import RESULT, RunFolder
from nmrun.registry import find

if TYPE_CHECKING:
    from nmrun.lab.export import finished_run

FORMATS = {
    "safetensors": "nmrun.lab.export.finished_run.write_plain",
    "packed": "nmrun.lab.export.packed.write",
    "onnx": "nmrun.lab.export.onnx_graph.write",
    "hf": "nmrun.lab.export.hf.write",
}


def main(argv: list[str]) -> int:
    """Check that every sparse layer holds its pattern, then write; returns 0.

    A format is a function of run and folder. It returns the lines to print, the first of which
    begins with a file's name, and raises ConfigError for a run or machine that it is not for,
    RunError for weights that it cannot write. All files are written beside DIR first.
    """
    parser = Parser(
        prog="nmrun export", description="Copy a finished run's model, checked, to a folder."
    )
    parser.add_argument(
        "run", type=Path, help="a run folder (holds result.json and model.safetensors)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="where to put the files and sparsity.json",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="safetensors",
        help="default: safetensors, zeros and all",
    )
    parser.add_argument(
        "--precision",
        choices=["int8"],
        help="with --format packed: linear layers in int8 where that changes their outputs little",
    )
    consent.consent_option(parser)
    options = parser.parse_args(argv)
    if options.precision and options.format != "packed":
        raise ConfigError(f"--precision {options.precision} is for --format packed alone")
    if not (options.run / RESULT).is_file():
        RunFolder(options.run).demand(options.run)
    from nmrun.lab.export import finished_run  # torch

    try:
        if options.out.resolve() == options.run.resolve():
            raise ConfigError(f"--out {options.out} is the run's own folder; name another")
        run = finished_run.load(options.run, options.yes)
        write = find("--format", options.format, FORMATS)
        if options.precision:
            write = partial(write, precision=options.precision)
        lines = _whole(run, options.out, write)
    except OSError as error:
        raise RunError(f"{error.filename or options.out}: {error.strerror or error}") from None
    print("\n".join(lines))
    return 0


def _whole(
    run: finished_run.FinishedRun,
    to: Path,
    write: Callable[[finished_run.FinishedRun, Path], list[str]],
) -> list[str]:
    """Write to a folder next to ``to``, whose files are then moved there. Other files in ``to`` stay. A
    kill may leave some files missing, but never files of two exports."""
    place = to.absolute()
    # a failure leaves no empty folders
    root = next(parent for parent in place.parents if parent.is_dir())
    with locks.folder_beside(root / place.name) as part, atomic.disk_errors(root / place.name):
        (new := part / "new").mkdir()
        first, *others = write(run, new)
        atomic.sync(new)
        to.mkdir(parents=True, exist_ok=True)
        names = [file.name for file in new.iterdir()]
        for name in names:
            (to / name).unlink(missing_ok=True)
        for name in names:
            os.rename(new / name, to / name)
    return [f"{to}{os.sep}{first}", *others]
