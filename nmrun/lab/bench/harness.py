"""What all benchmarks share: clocks, rounds in which the arms take turns, what these sum up to, on what
machine it was, and how it is printed and written.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from nmrun.errors import ConfigError, first_line
from nmrun.fast import acceleration
from nmrun.fast.gpu.kernels.cusparselt import loaded_cusparselt
from nmrun.kernels.compiler import cpuinfo
from nmrun.lab.show.formats import aligned
from nmrun.lab.verbs import quantity

# bytes that are written between two measurements on a GPU: more than any L2, and time for the host
# to get ahead
FLUSHED = 1 << 29
NO_MEMORY = "out of memory"
# of nvidia-smi's query
ON_GPU = {"power": "power.limit", "clock": "clocks.max.sm", "driver": "driver_version"}
Row = dict[str, Any]
Arm = TypeVar("Arm", bound=Hashable)  # its name
Machine = dict[str, Any]

# --- the machine ----------------------------------------------------------------------------------


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def needs_products(device: torch.device) -> None:
    """Raise ConfigError where this device has no 2:4 products."""
    if why := acceleration.obstacle(device):
        raise ConfigError(f"{why}: there are no 2:4 products to measure")


def hardware(device: torch.device | str = "cpu") -> Machine:
    """Where the numbers come from, as plain data: what is needed to compare them with others."""
    device, cpu = torch.device(device), platform.processor() or platform.machine()
    facts = cpuinfo()
    if {"model name", "cpu family", "model"} <= facts.keys():
        cpu = f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
    about: Machine = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if device.type == "cuda":
        library, gpu = loaded_cusparselt(), torch.cuda.get_device_properties(device)
        try:
            triton = version("triton")
        except PackageNotFoundError:
            triton = None
        about |= {
            "gpu": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30),
            "cuda": torch.version.cuda,
            "cusparselt": ".".join(map(str, library[0])) if library else None,
            "triton": triton,
            **dict(zip(ON_GPU, nvidia_smi(*ON_GPU.values(), gpu=f"GPU-{gpu.uuid}"), strict=False)),
        }
    return about


def nvidia_smi(*fields: str, gpu: str = "0") -> list[str]:
    """The values of fields of nvidia-smi's query; none where it does not answer."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    words = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={gpu}"]
    try:
        output = subprocess.run(
            words, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [value.strip() for value in output.split(",")]


def machine_line(machine: Machine) -> str:
    if "gpu" in machine:
        more = ", ".join(str(machine[key]) for key in ("power", "clock") if key in machine)
        return f"{machine['gpu']} ({more}), torch {machine['torch']}, CUDA {machine['cuda']}, cuSPARSELt {machine['cusparselt']}"
    cores, threads = quantity(machine["cores"], "core"), quantity(machine["threads"], "thread")
    return f"{machine['cpu']}, {cores}, {threads}, load {machine['load']}, torch {machine['torch']}"


# Ctrl-C in the middle of rounds waits here while `run` is there to report them and to raise it then
_waiting: list[KeyboardInterrupt] = []
_in_run = False

# --- time -----------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of a call: on a GPU between two events, on a CPU by the wall. ``flush`` empties
    a GPU's L2 cache before, by writing to other memory."""

    def __init__(self, device: torch.device, flush: bool = True) -> None:
        self.gpu = device.type == "cuda"
        self.now = time.perf_counter
        self.other = (
            torch.empty(FLUSHED, dtype=torch.int8, device=device) if self.gpu and flush else None
        )

    def __call__(self, call: Callable[[], object]) -> float:
        if not self.gpu:
            began = self.now()
            call()
            return 1e3 * (self.now() - began)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.other is not None:
            self.other.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def cpu_clock() -> Clock:
    """The clock of a CPU: with one thread its CPU time, which a busy machine does not disturb."""
    clock = Clock(torch.device("cpu"))
    if torch.get_num_threads() == 1:
        clock.now = time.thread_time
    return clock


def cpu_clock_name() -> str:
    return "CPU time" if torch.get_num_threads() == 1 else "wall time"


@contextlib.contextmanager
def spared(
    wrong: dict[str, str], arm: str, *errors: type[Exception], base: bool = False
) -> Iterator[None]:
    """An arm that fails by one of these ``errors`` is a line in ``wrong``, and costs the others nothing.
    Not so without memory, and of the ``base`` that all are compared with."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except errors as error:
        if base:
            raise
        wrong[arm] = first_line(error)


def rounds(
    arms: Mapping[Arm, Callable[[], object]],
    count: int,
    clock: Callable[[Callable[[], object]], float],
    warm_up: int = 2,
) -> dict[Arm, list[float]]:
    """Time arms in turns: a round runs every arm once, in an order shuffled anew, so that a machine
    that grows slower or faster meanwhile favours none. ``warm_up`` rounds before do not count. Ctrl-C
    under :func:`run` leaves the whole rounds before it: it is raised once these are reported."""
    if _waiting:
        raise _waiting.pop()
    shuffled, times = random.Random(0), {name: list[float]() for name in arms}
    for _ in range(warm_up):
        for call in arms.values():
            clock(call)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            order = shuffled.sample(list(arms), len(arms))
            for name, ms in [(name, clock(arms[name])) for name in order]:
                times[name].append(ms)
            gc.collect()
    except KeyboardInterrupt as end:
        if not _in_run or not all(times.values()):
            raise
        _waiting.append(end)
    finally:
        if collecting:
            gc.enable()
    return times


def cut_off() -> bool:
    """Whether Ctrl-C has ended the rounds of this case: only their rows are still to be made."""
    return bool(_waiting)


@contextlib.contextmanager
def reported_first() -> Iterator[None]:
    """A context for what a report can do without: Ctrl-C ends it, and is raised after the report."""
    try:
        yield
    except KeyboardInterrupt as end:
        if not _in_run:
            raise
        _waiting.append(end)


def samples(rows: Sequence[Row]) -> str:
    """How many rounds rows are of: ``8``, or ``3 to 8`` where one was cut off."""
    counts = sorted({row["n"] for row in rows if "n" in row}) or [0]
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def quartiles(name: str, values: Sequence[float]) -> Row:
    """A median by its ``name`` and its quartiles by ``name_q1`` and ``name_q3``."""
    q1, median, q3 = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return {name: median, f"{name}_q1": q1, f"{name}_q3": q3}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def speedup(times: Sequence[float], base: Sequence[float]) -> Row:
    """Milliseconds, and how many times as fast as ``base`` in the same rounds."""
    return {
        "n": len(times),
        **quartiles("ms", times),
        **quartiles("speedup", ratios(base, times)),
    }


# --- what is printed and written ------------------------------------------------------------------


def note(text: str) -> None:
    print(f"measuring {text} ...", file=sys.stderr, flush=True)


def spread(row: Row, name: str) -> str:
    """A median and its quartiles: ``1.32 [1.30, 1.35]``."""
    middle, q1, q3 = (f"{row[key]:#.3g}".rstrip(".") for key in (name, f"{name}_q1", f"{name}_q3"))
    return f"{middle} [{q1}, {q3}]"


def speed(row: Row, base: str = "dense") -> str:
    """Milliseconds of the arm ``base``, of others how many times as fast they are."""
    return f"{row['ms']:.3g} ms" if row["arm"] == base else spread(row, "speedup")


def grid(rows: Sequence[Row], down: str, across: str, cell: Callable[[Row], str]) -> str:
    """A table in Markdown: a line for each value of the key ``down``, a column for each of
    ``across``. A row that has ``wrong`` says that."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    cells = {
        (row[down], row[across]): row["wrong"] if row.get("wrong") else cell(row) for row in rows
    }
    lines = [
        [str(d), *(cells.get((d, a), "") for a in columns)]
        for d in dict.fromkeys(row[down] for row in rows)
    ]
    return aligned([down, *map(str, columns)], lines)


class Benchmark(NamedTuple):
    """The ``cases`` of a benchmark, measured as they are asked for, and the ``page`` of their rows.
    ``omissions`` says what cannot be measured, a line each below the page; where that is all, it is a
    mistake in the command."""

    cases: Iterable[list[Row]]
    page: Callable[[list[Row]], str]
    device: torch.device
    variant: str = ""
    omissions: Sequence[str] = ()


def run(name: str, benchmark: Benchmark, out: Path | None, argv: Sequence[str]) -> None:
    """Measure case by case, then print the page and with ``--out`` write it as .md and .json. What
    is there is reported also where an error or Ctrl-C is the end."""
    global _in_run
    rows: list[Row] = []
    cases, page, device, variant, omissions = benchmark
    _in_run = True
    try:
        for case in cases:
            rows += case
            if _waiting:
                raise _waiting.pop()
    finally:
        _in_run = False
        _waiting.clear()
        if rows:
            machine, command = hardware(device), shlex.join(["nmrun", "bench", name, *argv])
            text = "\n\n".join([page(rows), *omissions, machine_line(machine), f"    {command}"])
            print(text)
            if out:
                stem = f"{name}{variant}_{'gpu' if device.type == 'cuda' else 'cpu'}"
                about = {"benchmark": name, "command": command, "hardware": machine}
                record = {**about, "rows": [_plain(row) for row in rows]}
                (out / f"{stem}.md").write_text(text + "\n")
                (out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    if omissions and not rows:
        raise ConfigError(list(omissions))


def _plain(row: Row) -> Row:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
        for key, value in row.items()
    }
