"""What products with sparse activations would gain on a CPU: a feed-forward layer whose activations
are packed anew in every pass, by nmrun's kernels for N:M weights, against the dense layer.

    python benchmarks/activation_products.py [--threads 1] [--rounds 12] [--out benchmarks/results/activation_products.md]

The kernels leave out every zero, those that a squared ReLU has by itself and those of the pattern. By
the share of zeros of the squared ReLU: forward, the product Y = Z W^T, and a step, all six products
of the layer's forward and backward pass. "pruned" finds the N:M entries and packs them, "packed"
packs what is not 0 without any pruning, so that the result is the dense one. float32; the dense layer
is by the faster of torch and oneDNN. One thread: CPU time, more: wall time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.lab.bench.harness import Clock, rounds, speedup
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold

TOKENS, WIDTH, FEATURES = 1024, 512, 2048
ZEROS = (0.5, 0.7, 0.85, 0.95)
PATTERN = Pattern(2, 4)


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


class Layer:
    """The operands: x (tokens, width), v (features, width), w (width, features), and the gradient of
    the output; v is moved so that ``zeros`` of the activations are 0."""

    def __init__(self, zeros: float) -> None:
        torch.manual_seed(0)
        self.x, self.dy = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
        self.v = torch.randn(FEATURES, WIDTH) / WIDTH**0.5
        self.w = torch.randn(WIDTH, FEATURES) / FEATURES**0.5
        self.bias = -torch.quantile(functional.linear(self.x, self.v).flatten()[::64], zeros)
        self.rows = PackedMatrix.empty(TOKENS, FEATURES)
        self.turned = PackedMatrix.empty(FEATURES, TOKENS)
        self.w_turned = self.w.t().contiguous()
        self.a = self.activations()[1]

    def activations(self) -> tuple[Tensor, Tensor]:
        """relu and its square."""
        relu = (functional.linear(self.x, self.v) + self.bias).relu_()
        return relu, relu.square()

    def dense_forward(self, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return product(self.a, self.w)

    def dense_step(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        relu = (product(self.x, self.v) + self.bias).relu_()
        z = relu.square()
        product(z, self.w)
        db = product(self.dy, self.w_turned).mul_(relu).mul_(2)
        product(self.dy.t(), z.t()), product(db, self.v.t()), product(db.t(), self.x.t())

    def forward(self, pruned: bool) -> Tensor:
        """The product with what is packed."""
        z = hard_threshold(self.a, PATTERN) if pruned else self.a
        products.pack(z, self.rows)
        return self.rows.multiply(self.w_turned, turned=True)

    def step(self, pruned: bool) -> None:
        """All but the first product with what is packed."""
        relu, a = self.activations()
        z = hard_threshold(a, PATTERN) if pruned else a
        products.pack(z, self.rows, self.turned)
        self.rows.multiply(self.w_turned, turned=True)
        self.turned.multiply(self.dy, turned=True)
        da = self.rows.sampled(self.w, self.dy.t().contiguous())
        db = da.mul_(relu).mul_(2)
        products.pack(db, self.rows, self.turned)
        self.rows.multiply(self.v, turned=True)
        self.turned.multiply(self.x, turned=True)


def lines(zeros: float, count: int, clock: Any) -> list[str]:
    """Two rows of the table."""
    layer = Layer(zeros)
    torch.testing.assert_close(
        layer.forward(False), functional.linear(layer.a, layer.w), rtol=1e-3, atol=1e-3
    )
    arms: dict[str, Callable[[], Any]] = {
        "torch forward": lambda: layer.dense_forward(functional.linear),
        "oneDNN forward": lambda: layer.dense_forward(onednn),
        "torch step": lambda: layer.dense_step(functional.linear),
        "oneDNN step": lambda: layer.dense_step(onednn),
        "pruning forward": lambda: hard_threshold(layer.a, PATTERN),
    }
    for name, pruned in (("pruned", True), ("packed", False)):
        arms[f"{name} forward"] = partial(layer.forward, pruned)
        arms[f"{name} step"] = partial(layer.step, pruned)
    with torch.no_grad():
        times = rounds(arms, count, clock)
    found, measured = [], float((layer.a == 0).float().mean())
    for what in ("forward", "step"):
        name = min(("torch", "oneDNN"), key=lambda n: statistics.median(times[f"{n} {what}"]))
        dense = times[f"{name} {what}"]
        cells = [f"{measured:.0%}", what, f"{statistics.median(dense):.3g} ms ({name})"]
        for arm in ("pruned", "packed"):
            row = speedup(times[f"{arm} {what}"], dense)
            quartiles = f"[{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]"
            cells.append(f"{row['speedup']:.2f} {quartiles}")
        alone = f"{statistics.median(times['pruning forward']):.3g} ms" if what == "forward" else ""
        found.append(f"| {' | '.join([*cells, alone])} |")
    return found


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="a .md file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = Clock()
    table = [
        f"{TOKENS} tokens, {WIDTH} to {FEATURES} to {WIDTH}, {options.threads} thread"
        f"{'s' if options.threads > 1 else ''}, float32: how many times as fast as the dense layer, median",
        f"[quartiles] of paired rounds, n = {options.rounds}. `python benchmarks/activation_products.py "
        f"--threads {options.threads}`",
        "",
        f"| zeros | | dense | {PATTERN}, pruned and packed | packed as it is | pruning alone |",
        "|---|---|---|---|---|---|",
        *(line for zeros in ZEROS for line in lines(zeros, options.rounds, clock)),
    ]
    print("\n".join(table))
    if options.out:
        options.out.write_text("# Products with sparse activations\n\n" + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
