"""A dense training step in bfloat16 over one in float32, on a CPU, by the size of the network's matrices.

    NMRUN_DATA=... python benchmarks/precision.py [--rounds 5] [--only gpt_128_64 ...] [--out FILE.md]

CPU time of one thread, both loops in turn in one process. ``trainer.precision=auto`` follows from it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from reference_loops import loop_of, ours

from nmrun.lab.bench.harness import Clock, hardware, machine_line, quartiles, rounds

SHORTEST = 1.2  # seconds of CPU that both loops take in a round
GPT = ("dataset=stdlib_text", "trainer.batch_size=16", "optimizer=adamw", "model=gpt_tiny")
PAIRS = ("dataset=multi30k", "dataset.vocabulary=4000", "model=fairseq_transformer", "model.heads=4", "model.layers=2")  # fmt: skip
IMAGES = ("dataset=cifar10",)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "vit_tiny": (
        "ViT-Tiny, 16 images",
        (*IMAGES, "model=vit_tiny", "model.patch=4", "trainer.batch_size=16"),
    ),
    "mlp": (
        "MLP of width 1024, digits",
        ("dataset=digits", "model=mlp", "model.hidden=[1024,1024]"),
    ),
    "resnet18": ("ResNet-18, 32 images", (*IMAGES, "model=resnet18", "trainer.batch_size=32")),
}
for width, context in ((128, 64), (128, 256), (192, 256), (256, 64), (256, 256)):
    CASES[f"gpt_{width}_{context}"] = (
        f"GPT of width {width}, 16 x {context} bytes",
        (*GPT, "model.layers=4", f"model.width={width}", f"dataset.context={context}"),
    )
for width, tokens in ((128, 1024), (128, 4096), (256, 1024), (256, 4096)):
    CASES[f"fairseq_{width}_{tokens}"] = (
        f"fairseq's Transformer of width {width}, {tokens} tokens",
        (*PAIRS, f"model.width={width}", f"model.ffn={2 * width}", f"dataset.max_tokens={tokens}"),
    )


def several(steps: Iterator[None], count: int) -> None:
    """So many training steps."""
    for _ in range(count):
        next(steps)


def row(title: str, overrides: tuple[str, ...], number: int) -> tuple[float, str]:
    """The median matrix of a network, and a line of the table."""
    loops = {p: loop_of([*overrides, f"trainer.precision={p}"]) for p in ("fp32", "bf16")}
    parameters = [*loops["fp32"].model.parameters()]
    matrix = statistics.median(p.numel() for p in parameters if p.dim() > 1)
    arms = {precision: ours(loop) for precision, loop in loops.items()}
    for steps in arms.values():
        several(steps, 2)
    began = time.process_time()
    for steps in arms.values():
        next(steps)
    count = math.ceil(SHORTEST / (time.process_time() - began))
    times = rounds({p: partial(several, arms[p], count) for p in arms}, number, Clock())
    pairs = zip(times["fp32"], times["bf16"], strict=True)
    found = quartiles("x", [low / full for full, low in pairs])
    milliseconds = statistics.median(times["fp32"]) / count
    weights = sum(p.numel() for p in parameters) / 1e6
    return matrix, (
        f"| {title} | {weights:.2f} million | {matrix:,.0f} | {milliseconds:.0f} | "
        f"{found['x']:.2f} [{found['x_q1']:.2f}, {found['x_q3']:.2f}] |"
    )


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="a .md file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(*CASES[name], options.rounds) for name in options.only]
    text = "\n".join(
        [
            "# A training step in bfloat16 over one in float32",
            "",
            "Dense, not compiled. CPU time of one thread, median [quartiles] of paired stretches in one process,",
            f"n = {options.rounds}. The rows go by the median matrix of the network.",
            "",
            f"{machine_line(hardware())}. `python benchmarks/precision.py --rounds {options.rounds}`",
            "",
            "| network and batch | weights | weights of the median matrix | ms in float32 | bfloat16 over float32 |",
            "|---|---|---|---|---|",
            *(line for _, line in sorted(rows)),
            "",
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
