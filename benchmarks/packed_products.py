"""N:M products of float32, bfloat16 or int8 on a CPU against oneDNN's dense ones.

    python benchmarks/packed_products.py --precision float32|bf16|int8 [--rounds 15] [--out FILE.md]

Results are checked against float32. CPU time of one thread; a sample of one token is the mean of 50
calls.
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

from nmrun.fast.cpu.kernels import bf16, int8, products
from nmrun.fast.cpu.packed_linear import Bf16Linear, Int8Linear, PackedLinear
from nmrun.lab.bench.harness import Clock, hardware, machine_line, quartiles, rounds
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold

# tokens, inputs, outputs
SIZES = ((1024, 768, 3072), (1024, 3072, 768), (512, 512, 2048), (1, 768, 3072))
PATTERNS = ("2:4", "1:4", "1:8", "1:16")
LAYERS: dict[str, Any] = {"float32": PackedLinear, "bf16": Bf16Linear, "int8": Int8Linear}
KERNELS = {"float32": products.KERNELS, "bf16": bf16.KERNELS, "int8": int8.KERNELS}
ABOUT = {
    "float32": "N:M by nmrun, and dense: as torch calls it (linear), and by oneDNN (float32).",
    "int8": (
        "N:M by nmrun, quantising included, and dense by oneDNN: in int8 with quantising (dynamic), in int8 without it\n"
        "(alone), in float32."
    ),
    "bf16": (
        "N:M by nmrun, and dense by oneDNN: in bfloat16 as torch calls it (linear), in bfloat16 with the weight in oneDNN's\n"
        "own layout (reordered), in float32."
    ),
}
Arms = dict[str, Callable[[], Tensor]]


def dense_int8(x: Tensor, weight: Tensor, bias: Tensor) -> Arms:
    """The dynamically quantised layer, which quantises its input in the call as nmrun's product
    does, and the product alone, given a quantised input."""
    scales = weight.abs().amax(1) / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    quantised = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
    torch.backends.quantized.engine = "onednn"
    held = torch.ops.quantized.linear_prepack(quantised, bias)
    step = float(x.max() - x.min()) / 255
    zero = round(-float(x.min()) / step)
    bytes_ = (x / step).round().add(zero).clamp(0, 255).to(torch.uint8)
    reordered = torch.ops.onednn.qlinear_prepack(quantised.int_repr(), list(x.shape))

    def alone() -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            bytes_, step, zero, reordered, scales, zeros.int(), bias, 1.0, 0, torch.float32,
            "none", [], "",
        )  # fmt: skip

    return {"dynamic": lambda: torch.ops.quantized.linear_dynamic(x, held), "alone": alone}


def dense_bf16(x: Tensor, weight: Tensor, bias: Tensor) -> Arms:
    """torch's layer, and the product with a weight in oneDNN's own layout."""
    low, own, added = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    reordered = torch.ops.mkldnn._reorder_linear_weight(own, len(x))
    return {
        "linear": lambda: torch.nn.functional.linear(low, own, added),
        "reordered": lambda: torch.ops.mkldnn._linear_pointwise(
            low, reordered, added, "none", [], ""
        ),
    }


def dense_float32(x: Tensor, weight: Tensor, bias: Tensor) -> Arms:
    """torch's layer."""
    return {"linear": lambda: torch.nn.functional.linear(x, weight, bias)}


DENSE = {"float32": dense_float32, "bf16": dense_bf16, "int8": dense_int8}


def lines(precision: str, tokens: int, inputs: int, outputs: int, count: int) -> list[str]:
    """The lines of one size."""
    torch.manual_seed(0)
    x, full, bias = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    own = torch.ops.mkldnn._reorder_linear_weight(full, len(x))
    dense = DENSE[precision](x, full, bias)
    dense["float32"] = lambda: torch.ops.mkldnn._linear_pointwise(x, own, bias, "none", [], "")
    arms, expected = dict(dense), dict.fromkeys(dense, full)
    for pattern in PATTERNS:
        weight = hard_threshold(full, Pattern.parse(pattern), 1).contiguous()
        layer = LAYERS[precision].of(weight, bias)
        given = x.bfloat16() if precision == "bf16" else x
        expected[pattern], arms[pattern] = weight, partial(layer, given)
    off = {}
    for name, call in arms.items():
        exact = x @ expected[name].t() + bias
        off[name] = float((call().float() - exact).norm() / exact.norm())
    calls = 50 if tokens == 1 else 1

    def repeated(call: Callable[[], Tensor]) -> None:
        for _ in range(calls):
            call()

    times = rounds({name: partial(repeated, call) for name, call in arms.items()}, count, Clock())
    found = []
    for name in arms:
        cells = [f"{tokens} x {inputs} x {outputs}", name]
        cells.append(f"{statistics.median(times[name]) / calls:.3g} ms")
        for base in dense:
            over = [b / t for b, t in zip(times[base], times[name], strict=True)]
            row = quartiles("x", over)
            cells.append(f"{row['x']:.2f} [{row['x_q1']:.2f}, {row['x_q3']:.2f}]")
        found.append(f"| {' | '.join([*cells, f'{off[name]:.2g}'])} |")
    return found


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--precision", choices=ABOUT, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a .md file")
    options = parser.parse_args()
    precision = options.precision
    if why := KERNELS[precision].obstacle():
        parser.error(f"--precision {precision}: {why}")
    torch.set_num_threads(1)
    with torch.no_grad():
        table = [line for size in SIZES for line in lines(precision, *size, options.rounds)]
    bases = {"int8": ["dynamic", "alone"], "bf16": ["linear", "reordered"]}.get(
        precision, ["linear"]
    )
    head = ["tokens x inputs x outputs", "arm", "ms", *(f"over {base}" for base in bases)]
    text = "\n".join(
        [
            f"# Products of {precision} on a CPU",
            "",
            f"{ABOUT[precision]} Milliseconds (median), and how many times as fast as each dense arm: median [quartiles] of",
            f"paired rounds, n = {options.rounds}, CPU time of one thread. Off: the error's share of the output's norm.",
            "",
            f"{machine_line(hardware())}. `python benchmarks/packed_products.py --precision {precision}`",
            "",
            f"| {' | '.join([*head, 'over float32', 'off'])} |",
            "|---" * (len(head) + 2) + "|",
            *table,
            "",
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
