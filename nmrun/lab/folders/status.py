"""``nmrun status``: how the runs in a folder and its last sweep stand, also while they run, and how
to repeat what did not finish.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError, neutral, tell
from nmrun.lab.folders import settings, sweep
from nmrun.lab.runs import documents, locks, run_folder
from nmrun.lab.runs.run_folder import CHECKPOINT, CONFIG, METRICS, RESULT, RunFolder
from nmrun.lab.verbs import Parser, aligned
from nmrun.lab.words import command_line
from nmrun.lab.words.identity import OF_COMMAND

STATES = ("finished", "running", "interrupted", "failed", "killed", "damaged")
PAUSE = 2.0  # seconds between two looks
MOST_RUNS = 20  # runs that are listed, without --all
PROGRESS = ("epoch", "step", "validation", "left")  # columns
DELETED = ".deleted-"  # how a folder begins that `nmrun rm` is about to delete, or was
FILES = {CONFIG, RESULT, CHECKPOINT}  # a run's folder has one of them


@dataclass(frozen=True)
class RunState:
    """A run folder as it stands; ``step`` is the last that ``metrics.jsonl`` has."""

    folder: str
    state: str
    error: str | None = None
    step: int | None = None
    command: str | None = None

    @property
    def title(self) -> str:
        return f"{self.state}{'' if self.step is None else f', step {self.step}'}: {self.folder}"


def runs(path: Path) -> list[RunState]:
    """The runs at or below a folder, by name. One without a result that no live process works on
    was killed."""
    return sorted((_run(folder) for folder in _folders(path)), key=lambda run: run.folder)


def sweeps(path: Path) -> list[tuple[Path, bool]]:
    """The folders of the sweeps that are running, or else of the last one, oldest first; and
    whether they are running."""
    folders = sorted(folder for folder in (path / ".sweeps").glob("*") if folder.is_dir())
    return [(folder, True) for folder in folders if locks.is_locked(folder)] or [
        (folder, False) for folder in folders[-1:]
    ]


def _folders(path: Path) -> Iterator[Path]:
    for place, below, files in run_folder.walk(path, _tell_left_out):
        folder = Path(place)
        named = run_folder.NAME.fullmatch(folder.absolute().name) is not None
        # one that begins has no file yet
        if (FILES & set(files) and (named or _has_config(folder))) or (
            not below and locks.is_locked(folder)
        ):
            yield folder
        below[:] = [
            name
            for name in below
            if not named and name != ".sweeps" and not name.startswith(DELETED)
        ]


def _has_config(folder: Path) -> bool:
    """Whether a config in a folder is a run's; others call their files config.yaml too."""
    return {"seed", "output_dir"} <= RunFolder(folder).config.keys()


@functools.cache  # once, however often --watch looks
def _tell_left_out(line: str) -> None:
    tell([f"left out: {line}"])


def _run(folder: Path) -> RunState:
    run = RunFolder(folder)
    state = run.result.get("status", "damaged" if run.problem else "killed")
    if locks.is_locked(folder):
        state = "running"
    if state == "finished":
        return RunState(str(folder), state)
    step = _step(folder)
    if state == "running":
        return RunState(str(folder), state, step=step)
    error = f"{RESULT}: {run.problem}" if run.problem else run.result.get("error")
    return RunState(str(folder), state, error, step, typed(command(run)))


def _step(folder: Path) -> int | None:
    rows = documents.newest_first(folder / METRICS)
    return next((int(row["step"]) for row in rows if type(row.get("step")) is int), None)


Command = tuple[str, str]  # the folder to change to before, empty for this one; and the command


def typed(command: Command | None) -> str | None:
    """The command as one types it."""
    place, text = command or ("", None)
    return f"cd {shlex.quote(place)} && {text}" if place else text


def command(run: RunFolder) -> Command | None:
    """The command for a run alone, as it is to be given here; None where it is not known."""
    if run.command is None:
        return None
    above = run.path.resolve().parents
    if "output_dir" not in run.config or len(above) < 5:
        return "", run.command
    # <dataset>/<model>/<recipe>/<ratio>/<run>
    return _local_command(run.command, run.config["output_dir"], above[4])


def _local_command(command: str, output_dir: str, place: Path) -> Command:
    """A command that was typed where ``place`` was its output_dir, as it is to be given here."""
    output = Path(output_dir)
    if output.resolve() == place:
        return "", command
    base = Path(*place.parts[: len(place.parts) - len(output.parts)])
    if not output.is_absolute() and base / output == place:
        return os.path.relpath(base), command
    # it was moved
    try:
        words = shlex.split(command)
    except ValueError:  # no command any more
        return "", command
    words = [word for word in words if not word.startswith("output_dir=")]
    return "", shlex.join([*words, command_line.word("output_dir", place)])


def sweep_lines(folder: Path, running: bool) -> list[str]:
    """A sweep in a line, and the command again if not all of it is done."""
    record = sweep.with_ends(folder)
    counts, ended = record.counts(), len(record.ends) == record.jobs
    state = "running" if running else "ended" if ended else "cut off"
    ends = ", ".join(f"{number} {status}" for status, number in counts.items())
    done = f"{record.done()} ({ends})" if ends else record.done()
    line = "; ".join(filter(None, [f"sweep {folder.name}, {state}: {done}", record.times(running)]))
    whole = ended and not set(counts) - {"finished", "skipped", "planned"}
    if running or whole or not record.command:
        return [line]
    return [
        line,
        f"  {typed(_local_command(record.command, record.output_dir, folder.resolve().parents[1]))}",
    ]


def _block(run: RunState) -> list[str]:
    return [run.title, *(f"  {line}" for line in (run.error, run.command) if line)]


def _table(states: list[RunState], path: Path) -> list[str]:
    """A line for each run: what it is, with the settings in which these runs differ, and how far."""
    rows = [_row(run, path) for run in states]
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "run"]
    always = {"state", "recipe", "ratio", "seed", "epoch", "step", "validation", "left"}
    heads = [
        key
        for key in sorted(columns, key=lambda key: (key in PROGRESS, key not in always))
        if any(row.get(key) for row in rows)
        and (key in always or len({row[key] for row in rows if key in row}) > 1)
    ]
    heads.append("run")
    cells = [heads, *([row.get(key, "") for key in heads] for row in rows)]
    return aligned(cells)


def _row(run: RunState, path: Path) -> dict[str, str]:
    """A run's cells by column: its state, all its settings, its progress, and its folder in ``path``."""
    folder = Path(run.folder)
    named: dict[str, str] = {}
    with contextlib.suppress(ConfigError, AttributeError, KeyError, TypeError, ValueError):
        named = settings.read(folder)
    ratio = named.pop("sparsity", "")
    named = {key: value for key, value in named.items() if key not in OF_COMMAND}
    first = {"recipe": named.pop("recipe", ""), "ratio": ratio, "seed": named.pop("seed", "")}
    last = _progress(folder, run.state == "running")
    place = os.path.relpath(folder, path)
    return {"state": run.state, **(first if ratio else {}), **named, **last, "run": place}


def _progress(folder: Path, running: bool) -> dict[str, str]:
    now = run_folder.position_of(folder, RunFolder(folder).config.get("trainer", {}))
    if now is None:
        return {}
    time_left = sweep.span(now.seconds_left) if running and now.seconds_left is not None else ""
    cells = {"step": now.steps, "epoch": now.epoch, "validation": now.validation, "left": time_left}
    return {key: value for key, value in cells.items() if value}


def path_option(parser: Parser) -> None:
    """The folder whose runs a verb is about; :func:`folder_of` gives it."""
    parser.add_argument(
        "path",
        nargs="?",
        default="outputs",
        type=Path,
        help="an output folder, any in it, or a run folder (default: outputs)",
    )


def folder_of(path: Path) -> Path:
    """The folder, which is there and can be read. Raises ConfigError where it is not."""
    if not path.is_dir():
        why = "it is a file; name a folder" if path.exists() else "no such folder"
        raise ConfigError(f"{path}: {why}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"{path}: {os.strerror(errno.EACCES)}")
    return path


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="nmrun status",
        description="Show how the runs in a folder and its last sweep stand, also while they run, and "
        "how to repeat what did not finish.",
    )
    path_option(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="the same as JSON, for scripts")
    kind.add_argument(
        "--watch", action="store_true", help="follow what runs, until it ends or Ctrl-C"
    )
    parser.add_argument("--all", action="store_true", help=f"list more than {MOST_RUNS} runs")
    options = parser.parse_args(argv)
    most = None if options.all else MOST_RUNS
    path = folder_of(options.path)
    if options.watch:
        return _watch(path, most)
    last, states = sweeps(path), runs(path)
    if not last and not states:
        raise ConfigError(f"{path}: no runs in it")
    if options.json:
        print(json.dumps(_plain(last, states), indent=2))
    else:
        print(neutral("\n".join(_lines(path, last, states, most))))
    return 0


def _plain(last: list[tuple[Path, bool]], states: list[RunState]) -> dict[str, Any]:
    records = [(folder, running, sweep.with_ends(folder)) for folder, running in last]
    entries = [
        {
            "folder": str(f),
            "running": on,
            "jobs": r.jobs,
            "done": r.counts(),
            "left": r.seconds_left() if on else None,
            "command": r.command,
        }
        for f, on, r in records
    ]
    rest = [asdict(run) for run in states if run.state != "finished"]
    return {"sweeps": entries, "runs": _counts(states), "unfinished": rest}


def _counts(states: list[RunState]) -> dict[str, int]:
    count = Counter(run.state for run in states)
    return {state: count[state] for state in STATES if count[state]}


def _lines(
    path: Path, last: list[tuple[Path, bool]], states: list[RunState], most: int | None
) -> list[str]:
    """Sweeps, counts, the runs (those that run first, then the unfinished, then the latest), and
    how to repeat those that did not finish."""
    lines = [line for folder, running in last for line in sweep_lines(folder, running)]
    counts = ", ".join(f"{number} {state}" for state, number in _counts(states).items())
    lines.append(f"runs in {path}: {counts or 'none yet'}")
    if not states:
        return lines
    head = sorted(states, key=_rank)[:most]
    lines += _table(head, path)
    if more := len(states) - len(head):
        lines.append(f"and {more} more: nmrun status --all {shlex.quote(str(path))}")
    rest = [run for run in head if run.state not in ("finished", "running")]
    return lines + [line for run in rest for line in _block(run)]


def _rank(run: RunState) -> tuple[int, float]:
    order = ("running", *STATES[2:], "finished")
    ended = 0.0
    if run.state == "finished":
        with contextlib.suppress(OSError):
            ended = (Path(run.folder) / RESULT).stat().st_mtime
    return order.index(run.state) if run.state in order else len(STATES) - 1, -ended


def _watch(path: Path, most: int | None) -> int:
    """The same until nothing runs any more, at one place of the terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False) as display:
        while True:
            last, states = sweeps(path), runs(path)
            lines = _lines(path, last, states, most) if last or states else ["no runs yet"]
            display.update(Text(neutral("\n".join(lines))), refresh=True)
            at_work = any(run.state == "running" for run in states)
            if not at_work and not any(running for _, running in last):
                return 0
            time.sleep(PAUSE)
