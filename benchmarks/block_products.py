"""Products with V:N:M weights on a CPU, and the optimizer step that makes them, as a CSV.

    python benchmarks/block_products.py [--rounds 15] [--out FILE.csv]

``blocks`` is V:N:M as blocks, ``rows`` the same weight by the products of any N:M. They are compared
with ``dense``: in bfloat16 oneDNN's product with the weight in its own layout, in int8 oneDNN's layer,
quantising included, as in nmrun's. Of the input gradient ``dense`` is torch's product. Of the optimizer
step (fused AdamW with SR-STE, ms a million weights) ``dense`` is N:M of the same N and M. CPU time of
one thread, rounds in which all arms take turns.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from nmrun import optim
from nmrun.fast.cpu.kernels import blocks
from nmrun.fast.cpu.linear import PRODUCTS, BlockProducts
from nmrun.fast.cpu.onednn import DenseInt8Linear, OneDNNLinear
from nmrun.fast.cpu.packed_linear import Bf16Linear, BlockLinear, Int8BlockLinear, Int8Linear
from nmrun.lab.bench.harness import Clock, hardware, machine_line, quartiles, ratios, rounds
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold
from nmrun.step.sparsify import sparsify

# tokens, inputs, outputs
SIZES = ((1024, 768, 3072), (1024, 3072, 768), (512, 512, 2048), (128, 768, 3072))
PATTERNS = ("64:4:8", "64:4:16", "64:4:32")
Arms = dict[tuple[str, str], Callable[[], object]]  # by name and pattern


def products(size: tuple[int, int, int]) -> Iterator[tuple[str, Arms]]:
    """The forward product in bfloat16 and int8, and the input gradient."""
    tokens, inputs, outputs = size
    full, x, dz = (
        torch.randn(*s) for s in ((outputs, inputs), (tokens, inputs), (tokens, outputs))
    )
    low, weight = x.bfloat16(), full.bfloat16()
    pruned = {pattern: hard_threshold(full, pattern).contiguous() for pattern in PATTERNS}
    dense: Arms = {("dense", ""): partial(OneDNNLinear(weight, None), low)}
    layers = {"rows": Bf16Linear, "blocks": BlockLinear}
    yield "output, bf16", dense | _of(layers, pruned, low)
    dense = {("dense", ""): partial(DenseInt8Linear.of(full), x)}
    yield "output, int8", dense | _of({"rows": Int8Linear, "blocks": Int8BlockLinear}, pruned, x)
    back: Arms = {("dense", ""): partial(torch.matmul, dz.bfloat16(), weight)}
    for pattern, w in pruned.items():
        packed = BlockProducts((outputs, inputs), torch.bfloat16, Pattern.parse(pattern))
        packed.write(w, None)
        matrix = packed.matrix(PRODUCTS[1])
        back["blocks", pattern] = partial(matrix.multiply, dz.bfloat16())
    yield "input gradient, bf16", back


def _of(layers: Mapping[str, Any], pruned: Mapping[str, Tensor], x: Tensor) -> Arms:
    return {
        (name, pattern): partial(layer.of(weight), x)
        for pattern, weight in pruned.items()
        for name, layer in layers.items()
    }


def step(pattern: str) -> Callable[[], object]:
    """The optimizer step of four weights of 3072 x 768."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(768, 3072, bias=False) for _ in range(4)))
    optimizer = optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sparsify(model, optimizer, "sr_ste", pattern, total_steps=10**9, exclude=())
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    return optimizer.step


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a .csv file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []

    def measure(what: str, size: str, arms: Arms) -> None:
        times = rounds(arms, options.rounds, Clock())
        base = next(iter(arms))
        for (arm, pattern), samples in times.items():
            row = {"what": what, "size": size, "arm": arm, "pattern": pattern, "n": len(samples)}
            over = quartiles("over_dense", ratios(times[base], samples))
            rows.append(row | quartiles("ms", samples) | over)

    for size in SIZES:
        torch.manual_seed(0)
        with torch.no_grad():
            for what, arms in products(size):
                measure(what, " x ".join(map(str, size)), arms)
    for pattern in PATTERNS:
        plain = str(Pattern.parse(pattern).by_rows)
        arms = {("dense", plain): step(plain), ("blocks", pattern): step(pattern)}
        measure("optimizer step", "9.4 million weights", arms)
    table = pd.DataFrame(rows).round(3)
    command = shlex.join(["python", *sys.argv])
    amx = blocks.tiles_obstacle() or "AMX"
    text = f"# {machine_line(hardware())}, {amx}; {command}\n{table.to_csv(index=False)}"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
