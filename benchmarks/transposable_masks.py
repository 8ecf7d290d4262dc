"""What the best transposable masks of large blocks cost: all blocks together against a linear
programme for each (scipy's HiGHS), in CPU time of one thread, and what each keeps.

    python benchmarks/transposable_masks.py [--out benchmarks/results/transposable_masks.md]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from nmrun.sparsity import transposable

RATIOS = ((2, 8), (4, 8), (2, 16), (8, 16), (4, 32), (16, 32))
WEIGHTS = 1 << 17  # of the matrix, normal
PROGRAMMES = 24  # blocks that are solved one by one


def by_programme(block: Tensor, n: int) -> Tensor:
    """The mask of one block (M, M) by scipy's solver."""
    m = len(block)
    sums = np.concatenate([np.kron(np.eye(m), np.ones(m)), np.kron(np.ones(m), np.eye(m))])
    gain = block.flatten().numpy()
    found = linprog(-gain, A_eq=sums, b_eq=np.full(2 * m, n), bounds=(0, 1), method="highs-ds")
    return torch.from_numpy(found.x).round().bool().view(m, m)


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its CPU time."""
    began = time.process_time()
    return work(), time.process_time() - began


def line(n: int, m: int) -> str:
    """A row of the table."""
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randn(WEIGHTS // m**2, m, m, generator=draw, dtype=torch.float64).abs()
    blocks /= blocks.amax((1, 2), keepdim=True)
    few = blocks[:PROGRAMMES]
    masks, together = seconds(lambda: transposable.best_masks(blocks, n))
    singly, apart = seconds(lambda: torch.stack([by_programme(block, n) for block in few]))
    improve, transposable._improve = transposable._improve, lambda *_: None
    rounded, plain = seconds(lambda: transposable.best_masks(blocks, n))
    transposable._improve = improve
    best = few[singly].sum()
    milliseconds = (1e3 * apart / len(few), 1e3 * plain / len(blocks), 1e3 * together / len(blocks))
    cells = [
        f"{n}:{m}",
        *(f"{each:.3g}" for each in milliseconds),
        f"{milliseconds[0] / milliseconds[2]:.0f}",
    ]
    cells += [f"{float(few[kept[: len(few)]].sum() / best):.4%}" for kept in (rounded, masks)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="a .md file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transposable.best_masks(torch.rand(64, 8, 8, dtype=torch.float64), 4)  # torch warms up
    lines = [
        "CPU milliseconds a block, one thread, normal weights; what is kept is a share of what the",
        "programmes keep. `python benchmarks/transposable_masks.py`",
        "",
        "| | programme | regularised, rounded | and improved | times faster | rounded keeps | improved keeps |",
        "|---|---|---|---|---|---|---|",
        *(line(*ratio) for ratio in RATIOS),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("# Transposable masks\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
