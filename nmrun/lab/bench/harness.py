"""What benchmarks share: clocks, rounds in which the arms take turns, medians of these, the
description of the machine, and the report."""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
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
        output = subprocess.check_output(words, text=True, timeout=20, stderr=subprocess.DEVNULL)
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
    """Milliseconds of a call, or of each of the ``steps`` that it makes.

    On a GPU they are between two events, launches included. On a CPU they are by the wall; with one
    thread they are the CPU time of the process, which a busy machine does not disturb. ``flush``
    empties a GPU's L2 cache before, by writing to other memory.
    """

    def __init__(
        self, device: str | torch.device = "cpu", steps: int = 1, flush: bool = False
    ) -> None:
        self.device, self.steps, threads = torch.device(device), steps, torch.get_num_threads()
        self.gpu, self.flushed = self.device.type == "cuda", None
        self.now, self.name = time.perf_counter, f"of wall time, {threads} threads"
        if threads == 1:
            self.now, self.name = time.process_time, "of CPU time, one thread"
        if self.gpu:
            self.name = "between two events of the GPU"
            self.flushed = torch.empty(FLUSHED if flush else 0, dtype=torch.int8, device=device)

    def __call__(self, call: Call) -> float:
        if self.flushed is None:
            began = self.now()
            call()
            return 1e3 * (self.now() - began) / self.steps
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flushed.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / self.steps


def rounds(
    arms: Mapping[Arm, Call], count: int, clock: Callable[[Call], float], warm_up: int = WARM_UP
) -> dict[Arm, list[float]]:
    """The times of ``count`` rounds, as of :func:`turns`; ``warm_up`` rounds before do not count."""
    whole = list(itertools.islice(turns(arms, clock), warm_up, warm_up + count))
    return {arm: [times[arm] for times in whole] for arm in arms}


def turns(arms: Mapping[Arm, Call], clock: Callable[[Call], float]) -> Iterator[dict[Arm, float]]:
    """Endless rounds. Each times every arm once, in a new random order, so that a machine that
    slows down or speeds up favours none."""
    shuffled, collecting = random.Random(0), gc.isenabled()
    while True:
        gc.disable()
        try:
            times = {arm: clock(arms[arm]) for arm in shuffled.sample(list(arms), len(arms))}
        finally:
            if collecting:
                gc.enable()
        gc.collect()
        yield times


def quartiles(name: str, values: Sequence[float]) -> Row:
    """A median by its ``name`` and its quartiles by ``name_q1`` and ``name_q3``."""
    q1, median, q3 = map(float, np.quantile(values, (0.25, 0.5, 0.75)))
    return {name: median, f"{name}_q1": q1, f"{name}_q3": q3}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def speedup(times: Sequence[float], base: Sequence[float]) -> Row:
    """Milliseconds, and how many times as fast as ``base`` in the same rounds."""
    faster = quartiles("speedup", ratios(base, times))
    return {"n": len(times), **quartiles("ms", times), **faster}


# --- one comparison -------------------------------------------------------------------------------


class Case(NamedTuple):
    """Arms that are compared.

    Attributes:
        about: what is measured, in all rows of the case.
        arms: how each is made, by its name; it is given its row, for figures of its own.
    """

    about: Row
    arms: Mapping[str, Callable[[Row], Call]]


def measure(case: Case, count: int, clock: Callable[[Call], float], rows: list[Row]) -> None:
    """Add a row for each arm, with the ``times`` of whole rounds, or what is ``wrong``.

    Each arm is made, and its first time printed; then they take turns. One that fails is left out. If
    the first one fails, so do all others.
    """
    of_arm: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    title = ", ".join(map(str, case.about.values()))
    for arm, make in case.arms.items():
        row = of_arm[arm] = {**case.about, "arm": arm}
        rows.append(row)
        note(f"{title}, {arm}: ", end="")
        try:
            call = make(row)
            for _ in range(WARM_UP):
                clock(call)
            first = clock(call)
        except (ConfigError, RuntimeError) as error:  # the compiler's and out of memory, too
            if isinstance(error, ConfigError) and not calls:
                raise
            row["wrong"] = first_line(error)
            note(row["wrong"])
            if not calls:
                break
        else:
            calls[arm] = call
            note(f"{first:.3g} ms at first")
    note(f"{title}: {quantity(count, 'round')} of {quantity(len(calls), 'arm')}")
    for times in itertools.islice(turns(calls, clock), count):
        for arm, ms in times.items():
            of_arm[arm].setdefault("times", []).append(ms)


def beside_first(rows: list[Row]) -> None:
    """Add how many times as fast as the first arm each is."""
    for row in rows:
        if "times" in row:
            row |= speedup(row["times"], rows[0]["times"])


# --- what is printed and written ------------------------------------------------------------------


def note(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def samples(rows: Sequence[Row]) -> int:
    """How many rounds rows are of."""
    return max((row["n"] for row in rows if "n" in row), default=0)


def spread(row: Row, name: str) -> str:
    """A median and its quartiles: ``1.32 [1.30, 1.35]``."""
    middle, q1, q3 = (f"{row[key]:#.3g}".rstrip(".") for key in (name, f"{name}_q1", f"{name}_q3"))
    return f"{middle} [{q1}, {q3}]"


def grid(rows: Sequence[Row], down: str, across: str, cell: Callable[[Row], str]) -> str:
    """A table in Markdown: a line for each value of the key ``down``, a column for each of
    ``across``. A row that has ``wrong`` says that."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    lines: dict[Any, Row] = {}
    for row in rows:
        lines.setdefault(row[down], {})[row[across]] = row.get("wrong") or cell(row)
    cells = [[str(name), *(line.get(a, "") for a in columns)] for name, line in lines.items()]
    return aligned([down, *map(str, columns)], cells)


def speeds(title: str, down: str, rows: list[Row]) -> str:
    """The page of rows of :func:`beside_first`, a line for each value of the key ``down``."""

    def cell(row: Row) -> str:
        first = row["arm"] == rows[0]["arm"]
        return f"{row['ms']:.3g} ms" if first else spread(row, "speedup")

    about = f"{title}. Median [quartiles] of paired rounds, n = {samples(rows)}."
    return f"{about}\n\n{grid(rows, down, 'arm', cell)}"


class Benchmark(NamedTuple):
    """The cases of a benchmark, made as they are asked for; how the rows of one are ``compared``, in
    place; and the ``page`` of all rows."""

    cases: Iterable[Case]
    page: Callable[[list[Row]], str]
    clock: Clock
    rounds: int
    compared: Callable[[list[Row]], None] = beside_first


def run(name: str, benchmark: Benchmark, out: Path | None, command: str) -> None:
    """Measure case by case, then print the page and with ``out`` write it as .md and .json.

    After an error or Ctrl-C the whole rounds so far are reported.
    """
    rows: list[Row] = []
    try:
        for case in benchmark.cases:
            measured: list[Row] = []
            try:
                measure(case, benchmark.rounds, benchmark.clock, measured)
            finally:
                benchmark.compared(measured)
                rows += [row for row in measured if row.pop("times", None) or "wrong" in row]
            torch.compiler.reset()  # the compiler keeps what it compiled, up to a limit
            gc.collect()
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        raise RunError(first_line(error)) from None
    finally:
        if any("ms" in row for row in rows):
            machine = hardware(benchmark.clock.device)
            text = "\n\n".join([benchmark.page(rows), machine_line(machine), f"    {command}"])
            print(text)
            if out:
                file = out / f"{name}_{'gpu' if benchmark.clock.gpu else 'cpu'}.md"
                file.write_text(text + "\n")
                record = {"benchmark": name, "command": command, "hardware": machine, "rows": rows}
                file.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    if not any("ms" in row for row in rows):
        raise RunError("; ".join(dict.fromkeys(f"{row['arm']}: {row['wrong']}" for row in rows)))
