"""Whether the products of a layer are right and faster with the pruned activations packed, on this
processor: tested and timed once a shape, with as few zeros as the pattern and a squared ReLU of
normal numbers leave. Training only adds zeros of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast import activations_cpu, dense_cpu
from nmrun.fast.activations_cpu import NAME, READS
from nmrun.fast.backends24 import fault
from nmrun.fast.probe_cpu import side_by_side
from nmrun.fast.times import Times
from nmrun.patterns import Pattern
from nmrun.sparsity.activations import keep_largest


@dataclass(frozen=True)
class Around:
    """A linear layer in training that ``reads`` or ``feeds`` activations: rows = outputs, columns =
    inputs, tokens of one micro-batch, ``pattern`` of the activations. float32."""

    rows: int
    columns: int
    tokens: int
    role: str
    pattern: Pattern

    @property
    def multiplications(self) -> int:
        """Of a dense product."""
        return self.rows * self.columns * self.tokens

    @property
    def paths(self) -> tuple[str, ...]:
        """What is tried."""
        return ("dense", *((dense_cpu.NAME,) if dense_cpu.available() else ()), NAME)

    def __str__(self) -> str:
        size = f"{self.columns} to {self.rows}, {self.tokens} tokens"
        return f"{size}, float32, {self.role} {self.pattern} activations"


def measure(shape: Around) -> dict[str, Times]:
    """The times of the layer by every path: the forward product, and both gradients as one."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((shape.rows, shape.columns), (shape.tokens, shape.columns), (shape.tokens, shape.rows))
    weight, x, d = (torch.randn(*size, generator=generator) for size in sizes)
    reads = shape.role == READS
    of = x if reads else d
    of.copy_(keep_largest(of.relu().square_(), shape.pattern))
    zeros = (x != 0) if reads else torch.ones_like(x)  # what masks the input's gradient

    def dense(product: Callable[[Tensor, Tensor], Tensor]) -> list[Callable[[], list[Tensor]]]:
        return [
            lambda: [product(x, weight)],
            lambda: [product(d, weight.t()), product(d.t(), x.t())],
        ]

    calls = {"dense": dense(functional.linear)}
    if dense_cpu.NAME in shape.paths:
        calls[dense_cpu.NAME] = dense(dense_cpu.product)
    if reads:
        calls[NAME] = [
            lambda: [activations_cpu.reads(x, weight, None)],
            lambda: [*activations_cpu.reads_back(x, weight, d)],
        ]
    else:
        calls[NAME] = [
            calls[dense_cpu.NAME if dense_cpu.NAME in calls else "dense"][0],
            lambda: [*activations_cpu.feeds_back(d, x, weight)],
        ]
    forward, (dx, dw) = calls["dense"][0](), calls["dense"][1]()
    expected = [*forward, dx * zeros, dw]
    found: dict[str, Times] = {}
    for name, own in calls.items():
        parts = [(own[0], 0), (own[1], 0), (own[1], 1)]
        made = [functools.partial(lambda call, i: call()[i], *part) for part in parts]
        if name == NAME and (wrong := next(filter(None, map(fault, made, expected)), "")):
            found[name] = Times(wrong=wrong)
    right = [name for name in calls if name not in found]
    taken = zip(*(side_by_side(*(calls[name][i] for name in right)) for i in range(2)), strict=True)
    return found | {n: Times(0.0, *times) for n, times in zip(right, taken, strict=True)}
