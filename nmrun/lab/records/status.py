"""``nmrun status``: the state of a folder's runs and its last sweep, also while they run, and how
to repeat what did not finish."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmrun.errors import ConfigError, neutral, tell
from nmrun.lab.arguments import Parser
from nmrun.lab.config import command_line
from nmrun.lab.config.identity import is_in_id
from nmrun.lab.output import aligned
from nmrun.lab.records import settings, sweep
from nmrun.lab.runs import documents, locks, run_folder
from nmrun.lab.runs.run_folder import CHECKPOINT, CONFIG, METRICS, RESULT, RunFolder, RunFolders
from nmrun.registry import no_such

STATES = ("finished", "running", "interrupted", "failed", "killed", "damaged")
MOST_RUNS = 20  # runs that are listed, without --all
LAST = ("age", "folder")  # columns
FILES = {CONFIG, RESULT, CHECKPOINT}  # a run's folder has at least one of them


@dataclass(frozen=True)
class RunState:
    """The state of a run folder."""

    run: RunFolder
    state: str
    error: str | None = None
    command: str | None = None

    @property
    def folder(self) -> str:
        return str(self.run.path)

    @property
    def title(self) -> str:
        return f"{self.state}: {self.folder}"


def runs(path: Path, folders: RunFolders | None = None) -> list[RunState]:
    """The runs at or below a folder, by name. A run without a result and without a live process was
    killed."""
    folders = RunFolders() if folders is None else folders
    return sorted(map(_run, _folders(path, folders)), key=lambda run: run.folder)


def sweeps(path: Path) -> list[tuple[Path, bool]]:
    """The folders of the running sweeps, oldest first, each with True; or of the last sweep, with
    False. A sweep also runs while a cluster's queue has jobs of it."""
    folders = sorted(folder for folder in (path / ".sweeps").glob("*") if folder.is_dir())
    running = [each for each in folders if locks.is_locked(each) or sweep.read(each).queued]
    return [(folder, True) for folder in running] or [(folder, False) for folder in folders[-1:]]


def _folders(path: Path, folders: RunFolders) -> Iterator[RunFolder]:
    for place, below, files in run_folder.walk(path, lambda line: tell([f"left out: {line}"])):
        folder = Path(place)
        named = run_folder.NAME.fullmatch(folder.absolute().name) is not None
        # other programs call their files config.yaml too
        ours = FILES & {*files} and (
            named or {"seed", "output_dir"} <= folders[place].config.keys()
        )
        # one that is just beginning has no file yet
        if ours or (not below and locks.is_locked(folder)):
            yield folders[place]
        below[:] = [name for name in below if not named and name != ".sweeps"]


def _run(run: RunFolder) -> RunState:
    state = run.result.get("status", "damaged" if run.problem else "killed")
    if locks.is_locked(run.path):
        return RunState(run, "running")
    if state == "finished":
        return RunState(run, state)
    error = f"{RESULT}: {run.problem}" if run.problem else run.result.get("error")
    return RunState(run, state, error, typed(command(run)))


Command = tuple[str, str]  # the folder to change to first, empty for this one; and the command


def typed(command: Command | None) -> str | None:
    """The command as one types it."""
    place, text = command or ("", None)
    return f"cd {shlex.quote(place)} && {text}" if place else text


def command(run: RunFolder) -> Command | None:
    """The command for this run alone, to be given from here; None where it is not known."""
    if run.command is None:
        return None
    above = run.path.resolve().parents
    if "output_dir" not in run.config or len(above) < 5:
        return "", run.command
    # <dataset>/<model>/<recipe>/<ratio>/<run>
    return _local_command(run.command, run.config["output_dir"], above[4])


def _local_command(command: str, output_dir: str, place: Path) -> Command:
    """A command whose output_dir was ``place``, to be given from here."""
    output = Path(output_dir)
    if output.resolve() == place:
        return "", command
    base = Path(*place.parts[: len(place.parts) - len(output.parts)])
    if not output.is_absolute() and base / output == place:
        return os.path.relpath(base), command
    # it was moved
    try:
        words = shlex.split(command)
    except ValueError:  # it is no longer a command
        return "", command
    words = [word for word in words if not word.startswith("output_dir=")]
    return "", shlex.join([*words, command_line.word("output_dir", place)])


def sweep_lines(folder: Path, running: bool) -> list[str]:
    """A line about a sweep, and its command if part of it is still to do."""
    record = sweep.with_ends(folder)
    counts, ended = record.counts(), len(record.ends) == record.jobs
    state = "running" if running else "ended" if ended else "cut off"
    ends = ", ".join(f"{number} {status}" for status, number in counts.items())
    done = f"{len(record.ends)} of {record.jobs or '?'} jobs done" + (f" ({ends})" if ends else "")
    line = "; ".join(filter(None, [f"sweep {folder.name}, {state}: {done}", record.times(running)]))
    whole = ended and not set(counts) - {"finished", "skipped", "planned"}
    if running or whole or not record.command:
        return [line, *sweep.queue_lines(record)]
    there = _local_command(record.command, record.output_dir, folder.resolve().parents[1])
    return [line, f"  {typed(there)}"]


def _tables(states: list[RunState], keys: Sequence[str]) -> list[str]:
    """A table for each data set and model, below their folder: a line for each run."""
    settings_of = {run: _settings(run) for run in states}
    known = dict.fromkeys(key for named in settings_of.values() for key in named)
    for key in keys:
        if key not in known:
            raise ConfigError(f"--columns {key}: {no_such('key', key, known)}")
    tables: dict[str, list[dict[str, str]]] = {}
    for run, named in settings_of.items():
        parts = Path(run.folder).parts
        place = Path(*parts[:-1])
        if len(parts) > 3 and parts[-3] == named.get("recipe"):
            place = Path(*parts[:-3], "*", "*")  # a shell finds the recipe and the ratio
        progress = {"epoch": "", "step": "", **_progress(run)}
        tables.setdefault(str(place), []).append(
            {
                "state": run.state,
                "recipe": named.get("recipe", ""),
                "ratio": named.get("sparsity", ""),
                "seed": named.get("seed", ""),
                **progress,
                **{key: named.get(key, "") for key in keys},
                "age": _age(run.run.path),
                "folder": run.run.path.absolute().name,
            }
        )
    lines = []
    for above, rows in tables.items():
        columns = dict.fromkeys(key for row in rows for key in row if key not in LAST)
        heads = [key for key in (*columns, *LAST) if any(row.get(key) for row in rows)]
        cells = [heads, *([row.get(key, "") for key in heads] for row in rows)]
        lines += [above, *(f"  {line}" for line in aligned(cells))]
    return lines


def _settings(run: RunState) -> dict[str, str]:
    """The settings of a run that are part of its id, as far as its config can be read."""
    with contextlib.suppress(ConfigError):  # of a folder without a config
        return {key: value for key, value in settings.of(run.run).items() if is_in_id(key)}
    return {}


def _progress(run: RunState) -> dict[str, str]:
    """The epoch of the last row (or the step, where a run's length is in steps), unless the run has
    finished; and the metric of the last evaluation."""
    trainer, cells = run.run.config.get("trainer", {}), dict[str, str]()
    for row in documents.newest_first(run.run.path / METRICS):
        if not cells and run.state != "finished":
            unit = "step" if trainer.get("steps") or type(row.get("epoch")) is not int else "epoch"
            total = None if trainer.get("budget") else trainer.get(f"{unit}s")
            cells[unit] = str(row.get(unit, "")) + (f"/{total}" if total else "")
        names = [key for key in row if key.startswith("eval/") and type(row[key]) in (int, float)]
        if names:
            name = next((key for key in names if key != "eval/loss"), names[0])
            return {**cells, name.removeprefix("eval/"): f"{row[name]:.4f}"}
    return cells


def _age(folder: Path) -> str:
    seconds = max(time.time() - _written(folder), 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="nmrun status",
        description="Show how the runs in a folder and its last sweep stand, also while they run, and "
        "how to repeat what did not finish.",
    )
    parser.add_argument(
        "path",
        nargs="?",
        default="outputs",
        type=Path,
        help="an output folder, any in it, or a run folder (default: outputs)",
    )
    parser.add_argument("--all", action="store_true", help=f"list more than {MOST_RUNS} runs")
    parser.add_argument(
        "--columns",
        default="",
        metavar="KEYS",
        help="config keys to show as well, such as optimizer.lr,trainer.epochs",
    )
    options = parser.parse_args(argv)
    keys = [key for key in options.columns.split(",") if key]
    print(neutral("\n".join(_lines(options.path, None if options.all else MOST_RUNS, keys))))
    return 0


def _lines(path: Path, most: int | None, keys: Sequence[str]) -> list[str]:
    """Sweeps, counts, the runs (those that run first, then the unfinished, then the latest), and
    how to repeat those that did not finish or delete those that failed."""
    last, states = sweeps(path), runs(path)
    if not last and not states:
        raise ConfigError(f"{path}: no runs in it" if path.is_dir() else f"{path}: no such folder")
    lines = [line for folder, running in last for line in sweep_lines(folder, running)]
    count = Counter(run.state for run in states)
    counts = ", ".join(f"{count[state]} {state}" for state in STATES if count[state])
    lines.append(f"runs in {path}: {counts or 'none yet'}")
    head = sorted(states, key=_rank)[:most]
    lines += _tables(head, keys) if head else []
    if more := len(states) - len(head):
        lines.append(f"and {more} more: nmrun status --all {shlex.quote(str(path))}")
    for run in head:
        if run.state not in ("finished", "running"):
            lines += [run.title, *(f"  {line}" for line in (run.error, run.command) if line)]
    if failed := [run.folder for run in states if run.state == "failed"]:
        lines.append(f"to delete what failed: rm -r {shlex.join(failed)}")
    return lines


def _rank(run: RunState) -> tuple[bool, bool, float]:
    return run.state == "finished", run.state != "running", -_written(run.run.path)


def _written(folder: Path) -> float:
    """When the run last wrote one of its files."""
    written = 0.0
    for path in (folder, *(folder / name for name in FILES | {METRICS})):
        with contextlib.suppress(OSError):
            written = max(written, path.stat().st_mtime)
    return written
