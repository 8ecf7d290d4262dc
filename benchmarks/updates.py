"""What a recipe adds to an optimizer step, against torch's fused AdamW of the same weights.

    python benchmarks/updates.py [--recipes sr_ste asp] [--weights 28] [--rounds 20] [--device cuda] [--out DIR]

The step is what the recipe does to the gradient, AdamW, and the projection. "one pass" is how runs do
it, by one kernel; "apart" are the recipe's hooks around torch's step, as with any other optimizer.
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
from torch import nn

from nmrun import optim
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import Benchmark, Call, Case, Row
from nmrun.step.sparsify import sparsify

SHAPE = (3072, 768)  # of a weight: GPT-2's feed-forward layers
RECIPES = ("asp", "ste", "sr_ste", "step", "s_ste", "t_sr_ste", "bi_mask")


def step(
    recipe: str, count: int, device: torch.device, in_one_pass: bool = True
) -> Callable[[], object]:
    """The optimizer step of ``count`` weights under a recipe at 2:4."""
    torch.manual_seed(0)
    layers = [nn.Linear(SHAPE[1], SHAPE[0], bias=False, device=device) for _ in range(count)]
    model = nn.Sequential(*layers)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # asp prunes and STEP switches after the first step; no other mask is searched again
    options: dict[str, Any] = {"asp": {"prune_at": 0.0}, "step": {"switch": 1e-9}}.get(recipe, {})
    options |= {"interval": 10**9} if recipe in ("t_sr_ste", "bi_mask") else {}
    sparsify(model, optimizer, recipe, "2:4", total_steps=10**9, exclude=(), **options)
    if not in_one_pass:
        optimizer.plan = lambda updates: []  # type: ignore[method-assign]
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    return optimizer.step


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--weights", type=float, default=28, help="millions")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    count = max(1, round(options.weights * 1e6 / (SHAPE[0] * SHAPE[1])))

    def of(recipe: str, in_one_pass: bool, _: Row) -> Call:
        return step(recipe, count, device, in_one_pass)

    def cases() -> Iterator[Case]:
        for recipe in options.recipes:
            arms = {
                "dense": partial(of, "dense", True),
                "one pass": partial(of, recipe, True),
                "apart": partial(of, recipe, False),
            }
            yield Case({"recipe": recipe}, arms)

    title = f"Optimizer steps of {options.weights:g} million float32 weights at 2:4, times as fast as fused AdamW"
    page = partial(harness.speeds, title, "recipe")
    command = shlex.join(["python", *sys.argv])
    clock = harness.Clock(device, flush=True)
    benchmark = Benchmark(cases(), page, clock, options.rounds)
    harness.run("updates", benchmark, options.out, command)


if __name__ == "__main__":
    main()
