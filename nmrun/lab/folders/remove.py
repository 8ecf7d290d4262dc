"""``nmrun rm``: delete the folders of runs that failed, or that have certain settings."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from nmrun.errors import ConfigError, RunError
from nmrun.lab.folders import settings, status
from nmrun.lab.runs import locks, run_folder
from nmrun.lab.verbs import Parser, agreed, quantity
from nmrun.registry import did_you_mean

# of a run, see _delete
REMNANT = re.compile(rf"{re.escape(status.DELETED)}{run_folder.NAME.pattern}-\d+")
Files = dict[Path, tuple[int, int]]  # size and time of change of each


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="nmrun rm",
        description="Delete the folders of runs that failed, or that have certain settings.",
    )
    status.path_option(parser)
    parser.add_argument("--failed", action="store_true", help="runs that failed")
    parser.add_argument(
        "--filter",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="runs with these settings, all of them: recipe=ste,sr_ste trainer.epochs!=2",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(argv)
    if not options.failed and not options.filter:
        raise ConfigError("rm: which runs? Name them by --failed or --filter KEY=VALUE")
    path = status.folder_of(options.path)
    folders = selection(path, options.failed, options.filter)
    runs = {folder: _files(folder) for folder in folders}
    print(*runs, sep="\n")
    what = _amount(runs.values())
    if not options.yes and not agreed("rm", f"delete {what}?"):
        print("nothing deleted")
        return 0
    for remnant in path.rglob(f"{status.DELETED}*"):  # by one that was killed
        if REMNANT.fullmatch(remnant.name):
            shutil.rmtree(remnant, ignore_errors=True)
    reasons = {folder: _delete(folder, files, path) for folder, files in runs.items()}
    gone = [runs[folder] for folder, why in reasons.items() if not why]
    if gone:
        print(f"deleted: {_amount(gone)}")
    if left := [f"{folder}: {why}" for folder, why in reasons.items() if why]:
        raise RunError(f"not deleted: {'; '.join(left)}")
    return 0


def selection(path: Path, failed: bool, conditions: Sequence[str]) -> list[Path]:
    """The run folders at or below ``path`` that nothing is at work on and all conditions fit; a run
    without a condition's key does not fit. ConfigError where none does, for an unknown key, and for
    ``KEY!=VALUE`` with a value that no run has."""
    wanted = [settings.Condition.of(text) for text in conditions]
    every = [run for run in status.runs(path) if run.state != "running"]
    if not every:
        raise ConfigError(f"{path}: no run in it that nothing is at work on")
    runs = {Path(run.folder): run.state for run in every}
    by_folder = {folder: _settings(folder) for folder in runs}
    keys = {key for run in by_folder.values() for key in run}
    fitting = [folder for folder, state in runs.items() if not failed or state == "failed"]
    for condition in wanted:
        key = condition.key
        if key not in keys:
            raise ConfigError(f"--filter {key}: no run has the key {key}{did_you_mean(key, keys)}")
        there = sorted({run[key] for run in by_folder.values() if key in run})
        for value in condition.values if condition.others else ():  # a slip would delete all
            if not any(settings.same(text, value) for text in there):
                raise ConfigError(
                    f"--filter {key}!={value}: no run has {value or 'this'}; "
                    f"{key} is {', '.join(there)}"
                )
        fitting = [
            folder
            for folder in fitting
            if key in by_folder[folder] and condition.fits(by_folder[folder][key])
        ]
    if not fitting:
        raise ConfigError(f"{path}: none of {len(runs)} runs fits; nothing to delete")
    return fitting


def _settings(folder: Path) -> dict[str, str]:
    try:
        return settings.read(folder)
    except ConfigError:  # cut off before it wrote any
        return {}


def _files(folder: Path) -> Files:
    files = {}
    for place, _, names in os.walk(folder):
        for file in (Path(place, name) for name in names if name != locks.NAME):
            with contextlib.suppress(OSError):
                stat = file.lstat()
                files[file] = (stat.st_size, stat.st_mtime_ns)
    return files


def _amount(runs: Collection[Files]) -> str:
    size = sum(size for files in runs for size, _ in files.values())
    return f"{quantity(len(runs), 'run')}, {size / 1e6:.1f} MB"


def _delete(folder: Path, listed: Files, path: Path) -> str:
    """Delete a run, and the folders between it and ``path`` that are empty then. Returns why not;
    empty if it did."""
    if folder.is_symlink():
        return f"it is a link; name {folder.resolve()}"
    place = folder.resolve()
    if not run_folder.NAME.fullmatch(place.name):
        return "it is not called as a run is (s<seed>-<id>) and may hold more; delete it yourself"
    hidden = place.with_name(f"{status.DELETED}{place.name}-{os.getpid()}")
    try:
        with locks.hold(folder) as ours:
            if not ours:
                return f"{locks.holder(folder)} is at work on it"
            if _files(folder) != listed:
                return "it has changed since it was listed"
            place.rename(hidden)  # at once: a kill leaves no half of a run
        with contextlib.suppress(FileNotFoundError):  # another `nmrun rm` may be at it
            shutil.rmtree(hidden)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    run_folder.remove_empty(place.parent, path.resolve())
    return ""
