"""``nmrun bench WHAT``: how fast masks, 2:4 products, layers, training and inference are on the
machine at hand.

Each benchmark is a module of this package, whose ``benchmark`` takes the values of its options; without
WHAT it is ``recipes``. ``options`` reads them, ``harness`` has what all share.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from nmrun.errors import ConfigError
from nmrun.registry import did_you_mean

BENCHMARKS = {
    "recipes": "a training step under each recipe over the dense one, on the CPU (the default)",
    "masks": "finding masks and projecting, against a copy of the same memory",
    "update": "an optimizer step with the recipe's part in one pass, and apart, against fused AdamW",
    "gemm": "products with a sparse weight against dense ones, by shape and tokens: 2:4 on a GPU, N:M on a CPU",
    "layer": "forward and backward of one linear layer: dense, masked, by 2:4 products",
    "train": "whole training steps: dense, masked, accelerated, and a bare loop",
    "infer": "forward passes of whole networks, dense and packed: 2:4 on a GPU, N:M on a CPU",
}


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if words in (["-h"], ["--help"]):
        print(
            "usage: nmrun bench [WHAT] [options]      nmrun bench WHAT --help lists those of WHAT\n"
        )
        print("\n".join(f"  {name:<9} {about}" for name, about in BENCHMARKS.items()))
        return 0
    what = words.pop(0) if words and not words[0].startswith("-") else "recipes"
    if what not in BENCHMARKS:
        raise ConfigError(
            f"bench {what}: it takes one of {', '.join(BENCHMARKS)}{did_you_mean(what, BENCHMARKS)}"
        )
    from nmrun.lab.bench import options

    arguments = options.parse(what, words)
    out = arguments.pop("out")
    import torch

    from nmrun.lab.bench import harness

    module = importlib.import_module(f"nmrun.lab.bench.{what}")
    threads = torch.get_num_threads()
    try:
        harness.run(what, module.benchmark(**arguments), out, words)
    finally:
        torch.set_num_threads(threads)
    return 0
