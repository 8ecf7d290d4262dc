"""``nmrun bench layer``: forward and backward of one linear layer, dense, masked and by 2:4
products.

A step is forward and backward of ``accumulate`` micro-batches, then the projection of the weight
(and its packing) once. Weights are float32; on a GPU products are bfloat16 (autocast). ``masked``
has zeros in a dense product; the others go by the fastest right 2:4 path. Without sparse tensor
cores all of them are masked, the same numbers by dense products, and "2:4" is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nmrun import optim
from nmrun.errors import ConfigError
from nmrun.fast import acceleration
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import NO_MEMORY, Benchmark, Clock, Row, rounds, speedup
from nmrun.lab.bench.options import LAYER_SHAPES, LAYER_TOKENS, shape
from nmrun.step.sparsify import sparsify

# name: recipe, its options, and whether it goes by 2:4 products where there are such
ARMS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "masked": ("ste", {}, False),
    "2:4": ("ste", {}, True),
    "2:4, double pruning": ("ste", {"input_gradient": "double_prune"}, True),
    "2:4, transposable": ("t_sr_ste", {"interval": 10**9}, True),
    "2:4, MVUE": ("ste", {"mvue": "2:4"}, True),
    "2:4, FP8": ("ste", {"fp8": True}, True),
}


class LayerArm:
    """One copy of the layer. Calling it does a step. ConfigError where no 2:4 path is right."""

    def __init__(
        self, recipe: str, options: dict[str, Any], by_products: bool, inputs: int, outputs: int, tokens: int, accumulate: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model, self.accumulate, self.device = (
            nn.Sequential(nn.Linear(inputs, outputs, device=device)),
            accumulate,
            device,
        )
        self.x = torch.randn(tokens, inputs, device=device).to(self.dtype).requires_grad_()
        self.dz = torch.randn(tokens, outputs, device=device, dtype=self.dtype)
        self.handle = sparsify(
            self.model, optim.AdamW(self.model.parameters()), recipe, "2:4", **options
        )
        self.path = "dense"
        if by_products:
            (choice,) = acceleration.accelerate(self.handle, self.forward, "force", accumulate)
            self.path = str(choice.path)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def forward(self) -> torch.Tensor:
        low = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype) if low else contextlib.nullcontext():
            z: torch.Tensor = self.model(self.x)
        return z

    def __call__(self) -> None:
        for _ in range(self.accumulate):
            self.forward().backward(self.dz)
        self.handle.refresh()
        self.x.grad = None
        self.model.zero_grad()


def measure(
    inputs: int, outputs: int, tokens: int, accumulate: int, count: int, device: torch.device
) -> list[Row]:
    about = {"shape": f"{inputs} to {outputs}", "tokens": tokens, "accumulate": accumulate}
    make = partial(
        LayerArm,
        inputs=inputs,
        outputs=outputs,
        tokens=tokens,
        accumulate=accumulate,
        device=device,
    )
    products = acceleration.is_24(device) and not acceleration.obstacle(device)
    names = [name for name in ARMS if products or name != "2:4"]
    arms: dict[str, Callable[[], None]] = {}
    paths, wrong = {}, dict[str, str]()
    try:
        for name in ("dense", *names):
            recipe, options, by_products = ARMS.get(name, ("dense", {}, False))
            # no path is right, or the library refuses
            with harness.spared(wrong, name, ConfigError, RuntimeError, base=name == "dense"):
                arm = make(recipe, options, by_products and products)
                arm()
                arms[name], paths[name] = arm, arm.path
        times = rounds(arms, count, Clock(device))
    except torch.OutOfMemoryError:
        return [{**about, "arm": name, "wrong": NO_MEMORY} for name in ("dense", *names)]
    rows: list[Row] = [{**about, "arm": name, "wrong": why} for name, why in wrong.items()]
    for name, samples in times.items():
        rows.append({**about, "arm": name, "path": paths[name], **speedup(samples, times["dense"])})
    return rows


def benchmark(
    shapes: Sequence[tuple[int, int]] | None, tokens: int | None, accumulate: Sequence[int], rounds: int,
    device: str,
) -> Benchmark:  # fmt: skip
    place = harness.device_of(device)
    token_count = tokens or LAYER_TOKENS[place.type]

    def cases() -> Iterator[list[Row]]:
        for inputs, outputs in shapes or map(shape, LAYER_SHAPES[place.type]):
            for batches in accumulate:
                harness.note(f"{inputs} to {outputs}, micro-batches: {batches}")
                yield measure(inputs, outputs, token_count, batches, rounds, place)

    def page(rows: list[Row]) -> str:
        products = acceleration.is_24(place) and not acceleration.obstacle(place)
        numbers = "bfloat16."
        if not products:
            numbers = "No sparse tensor cores here: float32, masks in dense products."
        title = (
            f"Forward and backward of a linear layer: times as fast as dense. "
            f"Median [quartiles] of paired rounds, n = {harness.samples(rows)}. {numbers} "
            f"{token_count} tokens a micro-batch; xN: N of them share a projection."
        )
        lines = [{**row, "size": f"{row['shape']}, x{row['accumulate']}"} for row in rows]
        return f"{title}\n\n{harness.grid(lines, 'size', 'arm', harness.speed)}"

    return Benchmark(cases(), page, place)
