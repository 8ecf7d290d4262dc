"""The record of a sweep, ``<output_dir>/.sweeps/<time>-<process>/``.

``sweep.json`` says what was asked for, ``jobs.jsonl`` the beginning and the end of each job.
Where jobs run side by side, ``job3.log`` has what the third one prints. Several processes may write
and read the record at the same time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun import atomic
from nmrun.errors import leads, tell
from nmrun.lab.output import span
from nmrun.lab.runs import documents, locks
from nmrun.lab.runs.run_folder import RunFolder, make_folder
from nmrun.ranges import Check

if TYPE_CHECKING:
    from nmrun.lab.config.precheck import Command

HEAD, JOBS = "sweep.json", "jobs.jsonl"
SWEEP = "NMRUN_SWEEP"  # tells job processes and the sweeper the sweep's folder
# of jobs, or of seconds since 1970: Python's JSON has NaN and Infinity too
COUNT = Check("a number", lambda value: isinstance(value, int | float) and abs(value) < 1e12)
MAYBE = Check("a number, or null", lambda value: value is None or COUNT.holds(value))
# the shapes of sweep.json, and of the lines of jobs.jsonl; ``queue`` is a job's id in a cluster
BEGUN = {"begun": COUNT, "jobs": MAYBE, "command": str, "output_dir": str, "sweeps?": [[str]]}
BEGINNING = {"job": int, "process": int, "overrides": [str], "folder": str, "begun?": COUNT}
QUEUED = {"job": int, "queue": str, "overrides": [str], "folder": str}
END = {
    "status": str, "folder?": str | None, "error?": str | None, "overrides?": [str],
    "seconds?": COUNT, "ended?": COUNT,
}  # fmt: skip
# statuses of jobs that went well, with their words in a summary; then of those that did not
WELL = {
    **{status: status for status in ("finished", "planned", "skipped")},
    "running": "running in another process",
    "queued": "in Slurm already",
}
STATUSES = (*WELL, "interrupted", "failed", "refused", "killed")
UNTRAINED = ("skipped", "planned", "running", "queued", "refused")  # took hardly any time


@contextlib.contextmanager
def recorded(asked: Command, command: str, sweeps: Sequence[list[str]] = ()) -> Iterator[Path]:
    """The record of a new sweep, which counts as running while the context is entered; of a plan
    (``dry=true``), and of ranks that do not lead, one that is removed at the end.

    ``command`` is as it was typed; ``sweeps`` are the overrides of each sweep. Raises ConfigError
    where the folder cannot be made.
    """
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere)
        if leads() and not asked.dry:
            place = Path(asked.output_dir, ".sweeps").absolute()
            # os.path says that a name that is too long does not exist; make_folder reports it
            while os.path.exists(
                folder := place / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            ):
                time.sleep(0.1)  # this process began another one in this second
            make_folder(folder, asked.output_dir)
        try:
            with locks.hold(folder):  # shows that the sweep is alive
                begin(folder, len(asked.jobs), command, asked.output_dir, sweeps)
                yield folder
        finally:
            if not (folder / HEAD).exists():  # the disk was full from the beginning
                shutil.rmtree(folder, ignore_errors=True)


def begin(
    folder: Path, jobs: int, command: str, output_dir: str, sweeps: Sequence[Sequence[str]] = ()
) -> None:
    """Begin the record of a sweep of ``jobs`` jobs; the other arguments are those of
    :func:`recorded`."""
    content = {
        "begun": time.time(),
        "jobs": jobs,
        "command": command,
        "output_dir": output_dir,
        "sweeps": [list(words) for words in sweeps],
    }
    atomic.write(folder / HEAD, json.dumps(content) + "\n")


def begins(
    folder: Path, number: int, overrides: list[str], run: Path, launched: bool = True
) -> None:
    """Note that a run of job ``number``, counted from 1, begins in this process. ``launched``:
    whether the sweep's process has started this one; else it may be on another host.
    """
    line = {"job": number, "overrides": overrides, "folder": str(run), "begun": time.time()}
    _note(folder, {**line, "process": os.getpid() if launched else 0})


def submits(folder: Path, number: int, overrides: list[str], run: str, queue: str) -> None:
    """Note that job ``number`` is in a cluster's queue, under the id ``queue``."""
    line = {"job": number, "overrides": overrides, "folder": run, "queue": queue}
    _note(folder, line)


def add(
    folder: Path,
    outcome: dict[str, Any],
    overrides: list[str],
    seconds: float,
    number: int | None = None,
) -> None:
    """Note the end of a job. ``number`` is that of its note at the beginning, if it has one."""
    keys = ("status", "folder", "error", "metric", "metrics", "queue")
    line = {key: outcome.get(key) for key in keys}
    line |= {"overrides": overrides, "seconds": round(seconds, 3), "ended": time.time()}
    _note(folder, line | {"job": number})


def note_signal(folder: Path, number: int) -> None:
    """Note that a signal ends the sweep, so that no further job begins."""
    _note(folder, {"signal": number})


def _note(folder: Path, line: dict[str, Any]) -> None:
    path = folder / JOBS
    try:
        with atomic.disk_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:  # later jobs may have room again
        tell([f"{error.filename}: {error.strerror}"])


@dataclass(frozen=True)
class Record:
    """The record of a sweep as it was read.

    ``ends`` has a line for each job that has ended. ``running`` has the last beginning of each that
    has not, by number; a killed worker's job stays there. ``submitted`` has likewise those that were
    put into a cluster's queue. ``signal`` is the one that ended the sweep."""

    begun: float | None
    jobs: int | None
    command: str
    output_dir: str
    sweeps: list[list[str]]
    ends: list[dict[str, Any]]
    running: dict[int, dict[str, Any]]
    submitted: dict[int, dict[str, Any]]
    signal: int | None

    @property
    def at_work(self) -> set[int]:
        """The processes of running jobs that the sweep's process has started."""
        return {line["process"] for line in self.running.values()} - {0}

    @property
    def queued(self) -> dict[int, dict[str, Any]]:
        """Those of the submitted that are still in the queue, where they wait or run; all of them
        where Slurm does not answer."""
        return {job: line for job, line in self.submitted.items() if is_queued(line["queue"])}

    def counts(self) -> dict[str, int]:
        """Ended jobs by status, in the order of ``STATUSES``."""
        counts = Counter(line["status"] for line in self.ends)
        return {status: counts[status] for status in STATUSES if counts[status]}

    def times(self, running: bool) -> str:
        """``25 s so far, 50 s left``; once the sweep has ended, the time that it took."""
        passed, left = self.elapsed(running), self.seconds_left() if running else None
        spans = {" so far" if running else "": passed, " left": left}
        return ", ".join(f"{span(s)}{what}" for what, s in spans.items() if s is not None)

    def elapsed(self, running: bool) -> float | None:
        """Seconds from the beginning to now, or to the last job's end once the sweep has ended;
        None where that is not known."""
        ends = [time.time()] if running else [e["ended"] for e in self.ends if "ended" in e]
        return None if self.begun is None or not ends else max(max(ends) - self.begun, 0.0)

    def seconds_left(self) -> float | None:
        """Seconds to the end, estimated from the jobs that trained; None before the first of them
        has ended, or where the number of jobs is not known. A job is taken to need their mean time
        or, where several run at a time, the elapsed time divided by their number."""
        times = [
            line["seconds"]
            for line in self.ends
            if line["status"] not in UNTRAINED and "seconds" in line
        ]
        passed = self.elapsed(running=True)
        if not times or not passed or self.jobs is None:
            return None
        return min(sum(times), passed) / len(times) * max(self.jobs - len(self.ends), 0)


def read(folder: Path) -> Record:
    """The present record. Lines that are missing or incomplete, as after a kill, are left out."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        lines, _ = documents.read_lines(folder / JOBS, _parse)
    head: dict[str, Any] = {"begun": None, "jobs": None}
    head |= {"command": "", "output_dir": "", "sweeps": []}
    with contextlib.suppress(OSError, ValueError):
        written = documents.read_json(folder / HEAD)
        if not documents.misfit(written, BEGUN):
            head |= {key: written[key] for key in head.keys() & written.keys()}
    no_words: dict[str, Any] = {"job": None, "overrides": []}
    ends = [{**no_words, **line} for line in lines if not documents.misfit(line, END)]
    ended = {line["job"] for line in ends}
    running, submitted = (
        {
            line["job"]: line
            for line in lines
            if not documents.misfit(line, shape) and line["job"] not in ended
        }
        for shape in (BEGINNING, QUEUED)
    )
    caught = next((line["signal"] for line in lines if type(line.get("signal")) is int), None)
    return Record(**head, ends=ends, running=running, submitted=submitted, signal=caught)


# The record grows, and is read before each job: a thousand lines a thousand times.
_parse = functools.lru_cache(maxsize=8192)(documents.parsed)


def title(folder: Path, number: int, overrides: list[str]) -> str:
    """The line above a job: ``[3/24] recipe=step seed=0 (12 min left)``."""
    record = read(folder)
    seconds = record.seconds_left()
    ahead = "" if seconds is None else f" ({span(seconds)} left)"
    return f"{name(record, {'job': number, 'overrides': overrides})}{ahead}"


def name(record: Record, line: dict[str, Any]) -> str:
    """A job's name, ``[3/24] recipe=step seed=0``, with the overrides in which jobs differ."""
    sweeps = [{_bare(word) for word in sweep} for sweep in record.sweeps]
    common = set.intersection(*sweeps) if sweeps else set()
    words = [word for word in line["overrides"] if _bare(word) not in common] or line["overrides"]
    return f"[{line['job']}/{record.jobs or '?'}] {_typed(words) or 'the defaults'}"


def _typed(words: Sequence[str]) -> str:
    """Overrides as one types them, without the ``++`` that Hydra needs for new keys."""
    return " ".join(word.lstrip("+") for word in words)


def _bare(word: str) -> str:
    """A word for comparison: Hydra writes ``true`` as ``True``."""
    return word.replace("\\", "").replace("'", "").lower()


def log_of(folder: Path, number: int) -> Path:
    """The file for the output of a job that runs side by side with others."""
    return folder / f"job{number}.log"


def is_own(folder: Path) -> bool:
    """Whether this process has begun the record; it is no launcher's worker then."""
    return folder.name.endswith(f"-{os.getpid()}")


def with_ends(folder: Path) -> Record:
    """The record, with the present state of jobs that were left to another process."""
    record = read(folder)
    return replace(record, ends=[_since(line) for line in record.ends])


def summary(folder: Path) -> tuple[str, int]:
    """The closing lines of a sweep, the last with the command for its table; and 1 if a job failed or
    never reported, else 0. A job that another process runs is left to that process; once it has
    ended, its end counts."""
    record = with_ends(folder)
    failed = [line for line in record.ends if line["status"] not in WELL]
    queued = record.queued
    missing = max((record.jobs or 0) - len(record.ends) - len(queued), 0)
    counts = {WELL[each]: n for each, n in record.counts().items() if each in WELL}
    counts |= {"not done": len(failed), "in Slurm": len(queued), "not reached": missing}
    parts = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    passed = record.elapsed(running=True)
    took = "" if passed is None else f"; {span(passed)}"
    total = len(record.ends) + len(queued) + missing
    lines = [f"sweep of {total}: {parts or 'nothing done'}{took}"]
    for line in failed:
        words = _typed(line["overrides"])
        said = ": ".join(filter(None, (line["status"], words, line.get("error"))))
        lines.append(f"  {said}  {line.get('folder') or ''}".rstrip())
    lines += queue_lines(record)
    done = [line for line in record.ends if line["status"] in ("finished", "skipped")]
    above = [Path(line.get("folder") or "").parents for line in done]
    # <dataset>/<model>/<recipe>/<ratio>/<run>
    places = {str(parents[3]) for parents in above if len(parents) > 3}
    if places:
        lines.append(f"  {shlex.join(['nmrun', 'table', *sorted(places)])}")
    return "\n".join(lines), 1 if failed or missing else 0


def queue_lines(record: Record) -> list[str]:
    """How to end the jobs that are in the queue; none without one."""
    arrays = dict.fromkeys(line["queue"].partition("_")[0] for line in record.queued.values())
    how = f"  scancel {' '.join(arrays)} ends what is in Slurm, and each job saves its run first"
    return [how] if arrays else []


def in_queue(output_dir: str) -> dict[str, str]:
    """By run folder, the job in the queue that a sweep with results in ``output_dir`` has submitted
    for it."""
    records = map(read, Path(output_dir, ".sweeps").glob("*"))
    return {line["folder"]: line["queue"] for each in records for line in each.queued.values()}


def _since(line: dict[str, Any]) -> dict[str, Any]:
    """The present state of a job that was left to another process; other jobs' ends as they are."""
    run = Path(line.get("folder") or "")
    if line["status"] not in ("running", "queued"):
        return line
    if locks.is_locked(run):
        return {**line, "status": "running"}
    result = RunFolder(run)
    if result.finished() is not None:
        return {**line, "status": "skipped"}
    if "queue" in line and is_queued(line["queue"]):
        return {**line, "status": "queued"}
    status = "killed" if result.is_finished else result.result.get("status", "killed")
    return {**line, "status": status, "error": result.result.get("error")}


# --- a cluster's queue ----------------------------------------------------------------------------

PAUSE = 10.0  # seconds between two questions, since many ask a queue
_asked: tuple[float, frozenset[str] | None] = (-PAUSE, None)


def queue_ids(anew: bool = False) -> frozenset[str] | None:
    """The ids of this user's jobs in the queue, waiting or running, as of the last ``PAUSE``
    seconds; of an array ``22_0``. None where Slurm does not answer."""
    global _asked
    if anew or time.monotonic() - _asked[0] >= PAUSE:
        text = _answer("squeue", "--me", "--array", "--noheader", "--format=%i")
        _asked = time.monotonic(), None if text is None else frozenset(text.split())
    return _asked[1]


def is_queued(job: str) -> bool:
    """Whether a job waits or runs; where Slurm is on this machine and does not answer, it may."""
    there = queue_ids()
    return job in there if there is not None else shutil.which("squeue") is not None


def queue_state(job: str) -> str:
    """What became of a job, such as ``CANCELLED`` or ``NODE_FAIL``, which Slurm knows for minutes."""
    text = _answer("scontrol", "--oneliner", "show", "job", job) or ""
    found = re.search(r"JobState=(\S+)", text)
    return found[1] if found else "gone"


def _answer(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    return None
