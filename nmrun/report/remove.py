"""``nmrun rm``: delete the folders of runs that failed, or that have certain settings."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from nmrun.errors import ConfigError, RunError
from nmrun.files import locks
from nmrun.registry import did_you_mean
from nmrun.report import settings, status
from nmrun.verbs import Parser


def main(argv: Sequence[str]) -> int:
    """List the runs, ask, and delete; returns the exit status."""
    parser = Parser(prog="nmrun rm", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "path",
        nargs="?",
        default="outputs",
        type=Path,
        help="an output folder, any in it, or a run folder (default: outputs)",
    )
    parser.add_argument("--failed", action="store_true", help="runs that failed")
    parser.add_argument(
        "--filter",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="runs with these settings, all of them: recipe=ste,sr_ste trainer.epochs=2",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(argv)
    if not options.failed and not options.filter:
        raise ConfigError("rm: which runs? Name them by --failed or --filter KEY=VALUE")
    if not options.path.is_dir():
        raise ConfigError(f"{options.path}: no such folder")
    found = chosen(options.path, options.failed, options.filter)
    size = sum(_size(folder) for folder in found)
    print(*found, sep="\n")
    what = f"{len(found)} run{'s' if len(found) > 1 else ''}, {size / 1e6:.1f} MB"
    if not options.yes and not _agreed(what):
        print("nothing deleted")
        return 0
    kept = [folder for folder in found if not _deleted(folder)]
    if kept:
        raise RunError(f"a process is at work on {', '.join(map(str, kept))}: not deleted")
    print(f"deleted: {what}")
    return 0


def chosen(path: Path, failed: bool, conditions: Sequence[str]) -> list[Path]:
    """The run folders at or below ``path`` that nothing is at work on and all conditions fit.

    Args:
        path: a folder.
        failed: only runs that failed.
        conditions: ``KEY=VALUE``, or several values with commas between; a run without the key
            does not fit.

    Raises:
        ConfigError: for a condition that is none or names no key of any run, or where no run fits.
    """
    for condition in conditions:
        if "=" not in condition:
            raise ConfigError(f"--filter {condition}: write KEY=VALUE, such as recipe=ste")
    every = [run for run in status.runs(path) if run.state != "running"]
    if not every:
        raise ConfigError(f"{path}: no run in it that nothing is at work on")
    runs = {Path(run.folder): run.state for run in every}
    told = {folder: _settings(folder) for folder in runs}
    keys = {key for own in told.values() for key in own}
    fitting = [folder for folder, state in runs.items() if not failed or state == "failed"]
    for condition in conditions:
        key, values = settings.alternatives(condition)
        if key not in keys:
            raise ConfigError(
                f"--filter {condition}: no run has the key {key}{did_you_mean(key, keys)}"
            )
        fitting = [
            folder
            for folder in fitting
            if key in told[folder] and any(settings.same(told[folder][key], v) for v in values)
        ]
    if not fitting:
        raise ConfigError(f"{path}: none of {len(runs)} runs fits; nothing to delete")
    return fitting


def _settings(folder: Path) -> dict[str, str]:
    try:
        return settings.of(folder)
    except ConfigError:  # cut off before it wrote any
        return {}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("rm: nobody to ask here; --yes deletes without")
    return input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")


def _deleted(folder: Path) -> bool:
    """Delete a run, and the folders above it that are empty then; False where somebody has it."""
    with locks.hold(folder) as ours:
        if not ours:
            return False
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        os.removedirs(folder.parent)
    return True
