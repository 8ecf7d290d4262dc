"""``nmrun bench masks``: how fast N:M masks are found and weights projected, against a copy of the
same tensor.

A copy reads and writes every weight once, as a projection at least has to: it is the memory bound.
Some arms write into a tensor that is there: nmrun's dispatch (C on the CPU, Triton on a GPU), its
reference in plain torch, ``torch.topk``, and a sort of every group. The official code of SR-STE
sorts so, and the code for STEP. Arms that make what they return are held against ``torch.clone``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from nmrun.kernels import projection
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import NO_MEMORY, Benchmark, Clock, Row, quartiles, ratios, rounds
from nmrun.lab.bench.options import COLUMNS
from nmrun.lab.bench.recipes import argsort_mask
from nmrun.patterns import Pattern
from nmrun.sparsity import metrics, nm_mask, reference


def dispatch(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    if not projection.project(weight, out, pattern, 1):
        in_torch(weight, out, pattern)


def in_torch(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    out.copy_(reference.hard_threshold(weight, pattern, 1))


def topk(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    groups = weight.view(-1, pattern.m)
    indices = groups.abs().topk(pattern.n, dim=1, sorted=False).indices
    torch.mul(weight, torch.zeros_like(groups).scatter_(1, indices, 1).view_as(weight), out=out)


def argsort(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    torch.mul(weight, argsort_mask(weight, pattern.n, pattern.m), out=out)


ARMS: dict[str, Callable[[Tensor, Tensor, Pattern], None]] = {
    "nmrun": dispatch,
    "reference": in_torch,
    "topk": topk,
    "argsort": argsort,
}


def mask(weight: Tensor, before: Tensor, pattern: Pattern) -> Tensor:
    return nm_mask(weight, pattern)


def mask_dim_0(weight: Tensor, before: Tensor, pattern: Pattern) -> Tensor:
    return nm_mask(weight.view(weight.shape[1], -1), pattern, dim=0)


def flip_rate(weight: Tensor, before: Tensor, pattern: Pattern) -> float:
    return int(torch.count_nonzero(nm_mask(weight, pattern) ^ before)) / weight.numel()


def kept_energy(weight: Tensor, before: Tensor, pattern: Pattern) -> float:
    nonzero, pruned = map(float, metrics.energies(weight, nm_mask(weight, pattern)))
    return nonzero / (nonzero + pruned)


# given an earlier mask
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Pattern], object]] = {
    "nm_mask": mask,
    "nm_mask dim 0": mask_dim_0,
    "flip_rate": flip_rate,
    "kept_energy": kept_energy,
}


def measure(
    pattern: Pattern,
    millions: float,
    arms: Sequence[str],
    dtype: torch.dtype,
    count: int,
    device: torch.device,
) -> list[Row]:
    columns = COLUMNS // pattern.m * pattern.m
    about = {
        "pattern": str(pattern),
        "millions": millions,
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        weight = torch.randn(max(1, round(millions * 1e6 / columns)), columns, device=device).to(
            dtype
        )
        out, before = torch.empty_like(weight), torch.rand_like(weight) < 0.5
        calls: dict[str, Callable[[], object]] = {
            "copy": partial(out.copy_, weight),
            "clone": weight.clone,
        }
        for name in arms:
            into = name in ARMS
            calls[name] = (
                partial(ARMS[name], weight, out, pattern)
                if into
                else partial(FUNCTIONS[name], weight, before, pattern)
            )
        times = rounds(calls, count, Clock(device), warm_up=1)
    except torch.OutOfMemoryError:
        return [{**about, "arm": name, "wrong": NO_MEMORY} for name in ("copy", "clone", *arms)]
    rows: list[Row] = []
    for name, samples in times.items():
        rate = [2 * weight.nbytes / 1e6 / ms for ms in samples]
        base = times["clone" if name in FUNCTIONS or name == "clone" else "copy"]
        copies = quartiles("copies", ratios(samples, base))
        figures = quartiles("ms", samples) | quartiles("gb_per_second", rate) | copies
        rows.append({**about, "arm": name, "n": len(samples), **figures})
    return rows


def _cell(row: Row, unit: str) -> str:
    """Multiples of the table's first column, and the figure behind them."""
    copies = "1" if row["arm"] == "clone" else harness.spread(row, "copies")
    return f"{copies}, {row[unit]:.3g} {'GB/s' if unit == 'gb_per_second' else 'ms'}"


def page(rows: list[Row]) -> str:
    """A table for each size, of what writes into a tensor and of what makes one."""
    parts = [
        "Masks and projections: median [quartiles] of paired rounds, "
        f"{rows[0]['dtype']}, n = {harness.samples(rows)}. First multiples of a copy, with GB/s "
        "of one read and one write. Then, for what makes new tensors, multiples of torch.clone."
    ]
    for millions in dict.fromkeys(row["millions"] for row in rows):
        parts.append(f"{millions:g} million weights")
        for first, names, unit in (("copy", ARMS, "gb_per_second"), ("clone", FUNCTIONS, "ms")):
            table_rows = [
                {**row, "N:M": row["pattern"]}
                for row in rows
                if row["millions"] == millions and row["arm"] in (first, *names)
            ]
            if {row["arm"] for row in table_rows} > {first}:
                parts.append(harness.grid(table_rows, "N:M", "arm", partial(_cell, unit=unit)))
    return "\n\n".join(parts)


def benchmark(
    sparsity: Sequence[Pattern], weights: Sequence[float], arms: Sequence[str], dtype: str, rounds: int,
    device: str,
) -> Benchmark:  # fmt: skip
    place, numbers = harness.device_of(device), getattr(torch, dtype)

    def cases() -> Iterator[list[Row]]:
        for millions in weights:
            for pattern in sparsity:
                harness.note(f"{pattern}, {millions:g} million weights")
                yield measure(pattern, millions, arms, numbers, rounds, place)

    return Benchmark(cases(), page, place)
