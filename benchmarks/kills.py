"""Kill -9 at random moments over a sweep, the same command after each, then the whole sweep: what
comes out has the bits of one left alone.

``python benchmarks/kills.py [--kills 100] [--out FILE]`` exits with 1 if anything differs, was done
twice or was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nmrun.lab import cli
from nmrun.lab.runs import locks

# 5 recipes, 2 ratios and 2 seeds: 20 runs of 40 steps, checkpoints after every 5th; STEP switches
# and ASP prunes halfway
SWEEP = (
    *(
        "recipe=step,asp,sr_ste,s_ste,ste",
        "sparsity=2:4,1:4",
        "seed=0,1",
        "model.channels=[8,8,8]",
        "trainer.batch_size=32",
    ),
    *(
        "trainer.limit_batches=5",
        "trainer.epochs=8",
        "trainer.log_every=2",
        "trainer.device=cpu",
        "trainer.threads=1",
    ),
    "track=local",
)
CLOCK = ("steps_per_second", "items_per_second", "time")
FILES = {
    "config.yaml",
    "run.log",
    "metrics.jsonl",
    "result.json",
    "checkpoint.pt",
    "model.safetensors",
    "best.safetensors",
}
# Processes are forked from one that has imported everything, so that a start costs no more than
# what a start of a sweep does itself.
_warm = multiprocessing.get_context("forkserver")
_warm.set_forkserver_preload(
    [
        "nmrun.lab.cli",
        "nmrun.lab.sweeps.jobs",
        "nmrun.lab.train.runner",
        "nmrun.lab.train.loop",
        "hydra.main",
        "sklearn.datasets",
    ]
)


def command(words: Sequence[str]) -> None:
    """``nmrun WORDS``, in a process of its own."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.argv = ["nmrun", *words]
    sys.exit(cli.main())


@contextlib.contextmanager
def started(words: Sequence[str]) -> Iterator[Any]:
    """The process of a command, which does not outlive the block."""
    process = _warm.Process(target=command, args=(tuple(words),))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def finish(words: Sequence[str]) -> None:
    """Run a command to its end; raises RuntimeError if it fails."""
    with started(words) as process:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"nmrun {' '.join(words)} ended with {process.exitcode}")


def trained(output: Path) -> dict[Path, tuple[int, int]]:
    """The file of rows of each run that has begun to train, told from those of earlier sittings by
    inode and time.
    """
    return {
        path: ((stat := path.stat()).st_ino, stat.st_mtime_ns)
        for path in output.rglob("metrics.jsonl")
    }


def finished(output: Path) -> dict[Path, tuple[int, int]]:
    """The weights of each run whose result says that it is finished, likewise."""
    done = [
        path.parent
        for path in output.rglob("result.json")
        if json.loads(path.read_text())["status"] == "finished"
    ]
    return {
        folder: ((stat := (folder / "model.safetensors").stat()).st_ino, stat.st_mtime_ns)
        for folder in done
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {key: value for key, value in row.items() if key not in CLOCK}
        for row in _lines(folder / "metrics.jsonl")
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines, without a last one that a kill has cut in two."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def share(output: Path, runs: int, steps: int) -> float:
    """How much of the sweep is done, from 0 to 1, by the last row of each run."""
    return sum(lines[-1]["step"] for path in trained(output) if (lines := rows(path.parent))) / (
        runs * steps
    )


def kill(
    words: Sequence[str], output: Path, kills: int, pause: float, chance: random.Random
) -> tuple[Counter[str], list[str]]:
    """Start the command and kill it, so many times. Where the kills fell, and what was wrong on the
    way.

    A quarter of the kills fall at any moment before training begins. The others fall up to
    ``pause`` seconds after some share of the sweep is done, drawn so that the shares are spread
    over what is left of it: in steps, not in seconds, since machines are now faster and now slower.
    """
    size = _size(words)
    fell, wrong, done = Counter[str](), list[str](), dict[Path, tuple[int, int]]()
    starting = 1.0
    for left in range(kills, 0, -1):
        before, began, now = trained(output), time.monotonic(), share(output, *size)
        goal = now + (1 - now) * chance.uniform(0, 2 / (left + 1))
        deadline = began + chance.uniform(0, starting) if chance.random() < 0.25 else None
        training = False
        with started(words) as process:
            while process.is_alive() and (deadline is None or time.monotonic() < deadline):
                if deadline is None and not training and trained(output) != before:
                    training, starting = True, time.monotonic() - began
                if training and deadline is None and share(output, *size) >= goal:
                    deadline = time.monotonic() + chance.uniform(0, pause)
                time.sleep(0.005)
            alive = process.is_alive()
        if alive:
            fell[_where(output, before, size[1])] += 1
        after = finished(output)
        wrong += [
            f"{folder} was done again after it had finished"
            for folder, stamp in done.items()
            if after.get(folder) != stamp
        ]
        done = after
        if not alive:
            break  # the sweep is done
    return fell, wrong


def _size(words: Sequence[str]) -> tuple[int, int]:
    """Of how many runs of how many steps a sweep is."""
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    runs = 1
    for key in ("recipe", "sparsity", "seed"):
        runs *= len(keys[key].split(","))
    return runs, int(keys["trainer.epochs"]) * int(keys["trainer.limit_batches"])


def _where(output: Path, before: dict[Path, tuple[int, int]], total: int) -> str:
    """What the process was at when it was killed, in a sweep of runs of ``total`` steps."""
    touched = [path for path, stamp in trained(output).items() if before.get(path) != stamp]
    if not touched:
        return "before training"
    folder = max(touched, key=lambda path: path.stat().st_mtime_ns).parent
    if (folder / "result.json").exists():
        return "between two runs"
    lines = rows(folder)
    step = lines[-1]["step"] if lines else 0
    if step == total:
        return "while finishing a run"
    if folder.parent.parent.name == "step":
        return f"in STEP's {'first' if step <= total // 2 else 'second'} phase"
    return "in training with another recipe"


def differences(output: Path, alone: Path) -> list[str]:
    """What a completed sweep has that an undisturbed one has not, and the other way round;
    result.json but for clock and command.
    """
    wrong = []
    places = {path.parent.relative_to(alone) for path in alone.rglob("result.json")}
    wrong += [
        f"{place}: not the same runs"
        for place in places ^ {p.parent.relative_to(output) for p in output.rglob("metrics.jsonl")}
    ]
    for place in sorted(places):
        one, other = output / place, alone / place
        wrong += [f"{place / path.name}: left behind or missing" for path in _odd(one)]
        wrong += [
            f"{place / name}: other bits"
            for name in ("model.safetensors", "best.safetensors")
            if (one / name).read_bytes() != (other / name).read_bytes()
        ]
        wrong += [f"{place}/metrics.jsonl: other rows"] if rows(one) != rows(other) else []
        wrong += [f"{place}/result.json: another result"] if _result(one) != _result(other) else []
    # what each command did, by itself and by Hydra
    records = [path for path in (output / ".sweeps").rglob("*") if path.is_file()]
    wrong += [
        f"{path}: left behind"
        for path in records
        if path.name not in ("sweep.json", "jobs.jsonl", "multirun.yaml", locks.NAME)
    ]
    wrong += [
        f"{path}: left behind"
        for path in output.iterdir()
        if path.name not in (".sweeps", "digits")
    ]
    reports = [report for path in records if path.name == "jobs.jsonl" for report in _lines(path)]
    twice = Counter(report["folder"] for report in reports if report["status"] == "finished")
    return wrong + [
        f"{folder}: finished {count} times" for folder, count in twice.items() if count > 1
    ]


def _odd(folder: Path) -> list[Path]:
    # a kill at the very end leaves the lock file, which the next holder takes over
    there = {path.name for path in folder.iterdir()} - {locks.NAME}
    return [folder / name for name in there ^ FILES]


def _result(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    # the hashes are of files with the clock's figures in them
    clock = ("seconds", "training_seconds", "checkpoint_seconds")
    without = ("files", "sha256", *clock, "environment")
    kept = {key: value for key, value in result.items() if key not in without}
    return {**kept, "config": {**result["config"], "output_dir": ""}}


def trial(
    kills: int, sweep: Sequence[str], folder: Path, seed: int = 0
) -> tuple[Counter[str], list[str]]:
    """The whole experiment: where the kills fell, and all that was wrong, which should be nothing."""
    alone, output = folder / "alone", folder / "killed"
    finish(["-m", *sweep, f"output_dir={alone}"])
    pause = max(json.loads(path.read_text())["seconds"] for path in alone.rglob("result.json")) / 2
    words = ["-m", *sweep, f"output_dir={output}"]
    fell, wrong = kill(words, output, kills, pause, random.Random(seed))
    done = finished(output)
    finish(words)
    wrong += [
        f"{run} was done again after it had finished"
        for run, stamp in done.items()
        if finished(output)[run] != stamp
    ]
    return fell, wrong + differences(output, alone)


def made_with(folder: Path) -> str:
    """Code, machine and versions of the runs below a folder, in a sentence."""
    path = next(folder.rglob("result.json"))
    found = json.loads(path.read_text())["environment"]
    commit = f"commit {found['commit'][:7]}" if found["commit"] else "a copy"
    return (
        f"The code of {commit}{', changed' if found['dirty'] else ''}, {os.cpu_count()} cores of "
        f"{found['device']}, load {os.getloadavg()[2]:.1f}, torch {found['torch']}, "
        f"Python {found['python']}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="default: 100")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the figures there as Markdown"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        fell, wrong = trial(options.kills, SWEEP, Path(folder), options.seed)
        seconds = time.monotonic() - began
        machine = made_with(Path(folder))
    print("\n".join(wrong))
    verdict = (
        f"{len(wrong)} things wrong"
        if wrong
        else "every result has the bits of the undisturbed sweep, none done twice, no file left behind"
    )
    line = f"{sum(fell.values())} kills over {_size(SWEEP)[0]} runs in {seconds:.0f} s: {verdict}"
    print(line, *(f"  {count:4} {place}" for place, count in fell.most_common()), sep="\n")
    if options.out:
        table = [f"| {place} | {count} |" for place, count in fell.most_common()]
        head, command = "| the kill fell | kills |", shlex.join(["python", *sys.argv])
        lines = [f"{line}.", "", head, "|---|---|", *table, "", machine, "", f"    {command}", ""]
        options.out.write_text("\n".join(lines))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
