"""What benchmarks share: clocks, rounds in which the arms take turns, medians of these, the
description of the machine, and the report."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from nmrun.errors import ConfigError, RunError, first_line
from nmrun.fast.gpu.kernels.cusparselt import loaded_cusparselt
from nmrun.kernels.compiler import cpuinfo
from nmrun.lab.output import quantity
from nmrun.lab.render.formats import aligned

# bytes that are written between two measurements on a GPU: more than any L2, and time for the host
# to get ahead
FLUSHED = 1 << 29
WARM_UP = 2  # the first call compiles, the second captures a graph
# of nvidia-smi's query
ON_GPU = {"power": "power.limit", "clock": "clocks.max.sm", "driver": "driver_version"}
Row = dict[str, Any]
Call = Callable[[], object]
Arm = TypeVar("Arm", bound=Hashable)  # its name
Machine = dict[str, Any]

# --- the machine ----------------------------------------------------------------------------------


def hardware(device: torch.device | str = "cpu") -> Machine:
    """A description of the machine as plain data, so that numbers can be compared with others."""
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
        about |= {
            "gpu": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30),
            "cuda": torch.version.cuda,
            "cusparselt": ".".join(map(str, library[0])) if library else None,
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


# --- time -----------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of a call: on a GPU between two events, launches included; on a CPU by the wall,
    and with one thread the CPU time of the whole process, which a busy machine does not disturb.
    ``flush`` empties a GPU's L2 cache before, by writing to other memory."""

    def __init__(self, device: torch.device, flush: bool = False) -> None:
        self.gpu = device.type == "cuda"
        self.now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
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
    return Clock(torch.device("cpu"))


def clock_name(device: torch.device) -> str:
    """What a :class:`Clock` measures, after a number of milliseconds."""
    if device.type == "cuda":
        return "between two events of the GPU"
    threads = torch.get_num_threads()
    return "of CPU time, one thread" if threads == 1 else f"of wall time, {threads} threads"


def rounds(
    arms: Mapping[Arm, Call], count: int, clock: Callable[[Call], float], warm_up: int = 2
) -> dict[Arm, list[float]]:
    """The times of ``count`` rounds, as of :func:`timed_rounds`; ``warm_up`` rounds before do not count."""
    for _ in range(warm_up):
        for call in arms.values():
            clock(call)
    return by_arm(list(itertools.islice(timed_rounds(arms, clock), count)))


def timed_rounds(
    arms: Mapping[Arm, Call], clock: Callable[[Call], float]
) -> Iterator[dict[Arm, float]]:
    """Endless rounds. Each times every arm once, in a new random order, so that a machine that
    slows down or speeds up favours none."""
    shuffled, collecting = random.Random(0), gc.isenabled()
    while True:
        gc.disable()
        try:
            measured = {arm: clock(arms[arm]) for arm in shuffled.sample(list(arms), len(arms))}
        finally:
            if collecting:
                gc.enable()
        gc.collect()
        yield {arm: measured[arm] for arm in arms}


def by_arm(whole: Sequence[Mapping[Arm, float]]) -> dict[Arm, list[float]]:
    """The times of each arm, from those of each round."""
    return {arm: [times[arm] for times in whole] for arm in (whole[0] if whole else ())}


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


# --- one comparison -------------------------------------------------------------------------------


class Case(NamedTuple):
    """Arms that are compared.

    Attributes:
        name: what is measured, for the reader.
        arms: how each arm is made; the others are compared with the first.
        rows: of the results, from the times of each arm and, of those that failed, the reasons.
    """

    name: str
    arms: Mapping[Any, Callable[[], Call]]
    rows: Callable[[dict[Any, list[float]], dict[Any, str]], list[Row]]


class PairedRounds:
    """The measurement of a case, which can be read at any moment."""

    def __init__(self) -> None:
        self.first: dict[Any, float] = {}
        self.whole: list[dict[Any, float]] = []
        self.wrong: dict[Any, str] = {}

    def measure(self, case: Case, count: int, clock: Callable[[Call], float]) -> None:
        """Make each arm, say so, and print its first time; then let the arms take turns.

        An arm that fails is left out, with its reason. If the first one fails, so are all others.
        """
        calls: dict[Any, Call] = {}
        for arm, make in case.arms.items():
            note(f"{case.name}, {label(arm)}: ", end="")
            try:
                call = make()
                for _ in range(WARM_UP):
                    clock(call)
                self.first[arm] = clock(call)
            except (ConfigError, RuntimeError) as error:  # the compiler's and out of memory, too
                if isinstance(error, ConfigError) and not calls:
                    raise
                note(first_line(error))
                self.wrong[arm] = first_line(error)
                if not calls:
                    return
            else:
                calls[arm] = call
                note(f"{self.first[arm]:.3g} ms at first")
        note(f"{case.name}: {quantity(count, 'round')} of {quantity(len(calls), 'arm')}")
        for times in itertools.islice(timed_rounds(calls, clock), count):
            self.whole.append(times)

    @property
    def times(self) -> dict[Any, list[float]]:
        """Of whole rounds; before there is one, the first times."""
        return by_arm(self.whole or [self.first])


def beside_first(about: Row, times: dict[str, list[float]], wrong: dict[str, str]) -> list[Row]:
    """The rows of a case whose arms are strings: how many times as fast as the first they are."""
    base = next(iter(times.values()), [])
    rows = [{**about, "arm": arm, **speedup(each, base)} for arm, each in times.items()]
    return rows + [{**about, "arm": arm, "wrong": why} for arm, why in wrong.items()]


def label(arm: Any) -> str:
    return arm if isinstance(arm, str) else " ".join(filter(None, arm))


# --- what is printed and written ------------------------------------------------------------------


def note(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def samples(rows: Sequence[Row]) -> str:
    """How many rounds rows are of: ``8``, or ``3 to 8`` where one was cut off."""
    counts = sorted({row["n"] for row in rows if "n" in row}) or [0]
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def spread(row: Row, name: str) -> str:
    """A median and its quartiles: ``1.32 [1.30, 1.35]``."""
    middle, q1, q3 = (f"{row[key]:#.3g}".rstrip(".") for key in (name, f"{name}_q1", f"{name}_q3"))
    return f"{middle} [{q1}, {q3}]"


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


def speeds(title: str, down: str, rows: list[Row]) -> str:
    """The page of rows of :func:`beside_first`, a line for each value of the key ``down``."""

    def cell(row: Row) -> str:
        first = row["arm"] == rows[0]["arm"]
        return f"{row['ms']:.3g} ms" if first else spread(row, "speedup")

    about = f"{title}. Median [quartiles] of paired rounds, n = {samples(rows)}."
    return f"{about}\n\n{grid(rows, down, 'arm', cell)}"


class Benchmark(NamedTuple):
    """The cases of a benchmark, made as they are asked for, and the ``page`` of their rows."""

    cases: Iterable[Case]
    page: Callable[[list[Row]], str]
    device: torch.device
    clock: Callable[[Call], float]
    rounds: int


def run(name: str, benchmark: Benchmark, out: Path | None, command: str) -> None:
    """Measure case by case, then print the page and with ``out`` write it as .md and .json.

    After an error or Ctrl-C the results so far are reported.
    """
    rows: list[Row] = []
    try:
        for case in benchmark.cases:
            comparison = PairedRounds()
            try:
                comparison.measure(case, benchmark.rounds, benchmark.clock)
            finally:
                rows += case.rows(comparison.times, comparison.wrong)
            torch.compiler.reset()  # the compiler keeps what it compiled, up to a limit
            gc.collect()
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        raise RunError(first_line(error)) from None
    finally:
        if any("ms" in row for row in rows):
            report(name, rows, benchmark, out, command)
    if not any("ms" in row for row in rows):
        raise RunError("; ".join(dict.fromkeys(f"{row['arm']}: {row['wrong']}" for row in rows)))


def report(
    name: str, rows: list[Row], benchmark: Benchmark, out: Path | None, command: str
) -> None:
    """Print the page of some rows, and write both into the folder ``out``."""
    machine = hardware(benchmark.device)
    text = "\n\n".join([benchmark.page(rows), machine_line(machine), f"    {command}"])
    print(text)
    if out:
        stem = f"{name}_{'gpu' if benchmark.device.type == 'cuda' else 'cpu'}"
        about = {"benchmark": name, "command": command, "hardware": machine}
        record = {**about, "rows": [_rounded(row) for row in rows]}
        (out / f"{stem}.md").write_text(text + "\n")
        (out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")


def _rounded(row: Row) -> Row:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
        for key, value in row.items()
    }
