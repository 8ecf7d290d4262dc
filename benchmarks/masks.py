"""How long N:M masks and the projection of a weight take, against a copy of the same memory.

    python benchmarks/masks.py [--weights 10] [--sparsity 2:4 1:16] [--rounds 10] [--device cuda] [--out DIR]

A copy reads and writes every weight once, as a projection at least has to. ``topk`` and ``argsort`` are
the ways of plain torch; the official code of SR-STE and STEP sorts each group.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nmrun.kernels import projection
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import Benchmark, Call, Case, Row
from nmrun.patterns import Pattern
from nmrun.sparsity import reference

COLUMNS = 4096


def copy(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    out.copy_(weight)


def in_torch(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    out.copy_(reference.hard_threshold(weight, pattern, 1))


def nmruns(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    if not projection.project(weight, out, pattern, 1):
        in_torch(weight, out, pattern)


def topk(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    groups = weight.view(-1, pattern.m)
    kept = groups.abs().topk(pattern.n, dim=1, sorted=False).indices
    torch.mul(weight, torch.zeros_like(groups).scatter_(1, kept, 1).view_as(weight), out=out)


def argsort(weight: Tensor, out: Tensor, pattern: Pattern) -> None:
    groups = weight.view(-1, pattern.m)
    pruned = groups.abs().argsort(dim=1)[:, : pattern.m - pattern.n]
    torch.mul(weight, torch.ones_like(groups).scatter_(1, pruned, 0).view_as(weight), out=out)


Way = Callable[[Tensor, Tensor, Pattern], None]
WAYS: dict[str, Way] = {
    "copy": copy,
    "nmrun": nmruns,
    "reference": in_torch,
    "topk": topk,
    "argsort": argsort,
}


def call(way: Way, weight: Tensor, out: Tensor, pattern: Pattern, _: Row) -> Call:
    """One projection, ready to be timed."""
    return partial(way, weight, out, pattern)


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--weights", type=float, default=10, help="millions")
    parser.add_argument("--sparsity", nargs="+", type=Pattern.parse, default=[Pattern(2, 4)])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)

    def cases() -> Iterator[Case]:
        for pattern in options.sparsity:
            columns = COLUMNS // pattern.m * pattern.m
            weight = torch.randn(round(options.weights * 1e6 / columns), columns, device=device)
            out = torch.empty_like(weight)
            arms = {name: partial(call, way, weight, out, pattern) for name, way in WAYS.items()}
            about = {"N:M": str(pattern), "millions": options.weights}
            yield Case(about, arms)

    title = f"Projections of {options.weights:g} million float32 weights, times as fast as a copy"
    page = partial(harness.speeds, title, "N:M")
    command = shlex.join(["python", *sys.argv])
    clock = harness.Clock(device, flush=True)
    benchmark = Benchmark(cases(), page, clock, options.rounds)
    harness.run("masks", benchmark, options.out, command)


if __name__ == "__main__":
    main()
