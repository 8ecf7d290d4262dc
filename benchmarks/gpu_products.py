"""2:4 products on a GPU by cuSPARSELt: alone, and in a linear layer with forward, backward and projection.

    python benchmarks/gpu_products.py [--shapes 4096x16384] [--tokens 8192] [--layer] [--rounds 12] [--out DIR]

Alone it is ``x W^T`` against torch's dense product, bfloat16.
Numbers are drawn from N(0, 1), since they decide on a GPU's power and so on its clock. With ``--layer``
a step is forward and backward of ``--accumulate`` micro-batches and one projection.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun import optim
from nmrun.errors import refuse
from nmrun.fast import acceleration
from nmrun.fast.gpu import semi_structured
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import Benchmark, Call, Case, Row
from nmrun.step.sparsify import sparsify

DEVICE = torch.device("cuda")
# name: recipe, its options, and whether it goes by 2:4 products
LAYERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "dense": ("dense", {}, False),
    "masked": ("ste", {}, False),
    "2:4": ("ste", {}, True),
    "2:4, double pruning": ("ste", {"input_gradient": "double_prune"}, True),
    "2:4, transposable": ("t_sr_ste", {"interval": 10**9}, True),
    "2:4, MVUE": ("ste", {"mvue": "2:4"}, True),
}


def sparse(name: str, weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    """The same by the fastest right algorithm of a path, its weight packed beforehand."""
    parts = semi_structured.PATHS[name].pack(weight)
    expected = functional.linear(x.float(), weight.float())
    algorithm, _ = semi_structured.fastest(name, x, parts, None, expected)
    return partial(semi_structured.named(algorithm).multiply, x, parts, None)


def layer(name: str, inputs: int, outputs: int, tokens: int, accumulate: int) -> Call:
    """A step of one linear layer, its weight in float32 and its products in bfloat16."""
    recipe, options, by_products = LAYERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, device=DEVICE))
    x = torch.randn(tokens, inputs, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    dz = torch.randn(tokens, outputs, device=DEVICE, dtype=torch.bfloat16)
    optimizer = optim.AdamW(model.parameters())
    handle = sparsify(model, optimizer, recipe, "2:4", exclude=(), **options)

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            z: Tensor = model(x)
        return z

    if by_products:
        acceleration.accelerate(handle, forward, "force", accumulate)

    def step() -> None:
        for _ in range(accumulate):
            forward().backward(dz)
        handle.refresh()
        x.grad = None
        model.zero_grad()

    return step


def main() -> int:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["768x3072", "4096x16384"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if why := acceleration.obstacle(DEVICE):
        return refuse([f"{why}: there are no 2:4 products to measure"])

    def arms(inputs: int, outputs: int, tokens: int) -> dict[str, Callable[[Row], Call]]:
        if options.layer:

            def of(name: str, _: Row) -> Call:
                return layer(name, inputs, outputs, tokens, options.accumulate)

            return {name: partial(of, name) for name in LAYERS}
        x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
        weight = semi_structured.transposable(outputs, inputs, DEVICE)
        full = torch.randn(outputs, inputs, device=DEVICE).bfloat16()
        return {
            "dense": lambda _: partial(functional.linear, x, full),
            "cusparselt": lambda _: sparse("cusparselt", weight, x),
        }

    def cases() -> Iterator[Case]:
        for shape in options.shapes:
            inputs, outputs = map(int, shape.split("x"))
            for tokens in options.tokens:
                size = f"{inputs} to {outputs}, {tokens} tokens"
                yield Case({"size": size}, arms(inputs, outputs, tokens))

    what = (
        f"A linear layer, {options.accumulate} micro-batches a step" if options.layer else "x W^T"
    )
    page = partial(harness.speeds, f"{what}: times as fast as dense", "size")
    command = shlex.join(["python", *sys.argv])
    clock = harness.Clock(DEVICE, flush=True)
    benchmark = Benchmark(cases(), page, clock, options.rounds)
    name = "layer" if options.layer else "gemm"
    harness.run(name, benchmark, options.out, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
