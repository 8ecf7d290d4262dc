"""Draw what a pattern costs in accuracy against how fast it makes inference, N:M beside V:N:M.

python benchmarks/blocks_picture.py     # writes docs/pictures/blocks.svg

Accuracy is of SR-STE's runs in docs/results, speed of BERT-base in bfloat16 over OpenVINO's on a
Zen 4, all patterns in one process (benchmarks/results/infer_patterns_zen4.json).
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun.lab.render.style import COLOURS, GREY, looks, save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
SPEEDS = ROOT / "benchmarks" / "results" / "infer_patterns_zen4.json"
OUT = ROOT / "docs" / "pictures" / "blocks.svg"
KINDS = {  # by density
    "N:M": ["2:4", "1:4", "1:8", "1:16"],
    "V:N:M, V = 64": ["64:4:8", "64:4:16", "64:4:32"],
    "V:N:M, V = 32": ["32:4:16"],
    "V:N:M, V = 16": ["16:4:16"],
}
PARTS = {  # the runs, their metric, its factor and what it is
    "blocks_language.csv": ("test/perplexity", 1, "perplexity, tiny Shakespeare", True),
    "blocks_finetuning.csv": ("test/accuracy", 100, "accuracy in %, SST-2", False),
    "blocks_images.csv": ("test/accuracy", 100, "accuracy in %, CIFAR-10", False),
}


def speeds() -> dict[str, float]:
    """How many times as fast as OpenVINO each pattern is in bfloat16."""
    rows = json.loads(SPEEDS.read_text())["rows"]
    return {
        row["pattern"]: row["over_bf16"]
        for row in rows
        if (row["arm"], row["precision"], row["sequences"]) == ("packed", "bf16", 1)
    }


def draw(axes: Axes, file: str, fast: dict[str, float]) -> None:
    """One part of the picture: mean and deviation of the seeds of each pattern."""
    metric, factor, name, falls = PARTS[file]
    runs = pd.read_csv(RESULTS / file, low_memory=False)
    sparse = runs[runs["recipe"] == "sr_ste"].groupby("sparsity")[metric]
    mean, deviation = sparse.mean() * factor, sparse.std() * factor
    for colour, marker, (kind, patterns) in zip(COLOURS, "os^D", KINDS.items(), strict=False):
        there = [each for each in patterns if each in fast and each in mean]
        if not there:
            continue
        x, y = [fast[each] for each in there], [mean[each] for each in there]
        spread = [deviation[each] for each in there]
        axes.errorbar(x, y, spread, color=colour, marker=marker, capsize=3, label=kind)
        for each in there:
            axes.annotate(
                each, (fast[each], mean[each]), (5, 5), textcoords="offset points", size=7
            )
    dense = runs[runs["recipe"] == "dense"][metric].mean() * factor
    axes.axhline(dense, color=GREY, linestyle="--", label="dense")
    axes.set(xlabel="times as fast as OpenVINO in bfloat16", ylabel=name)
    if falls:
        axes.invert_yaxis()
    axes.legend(fontsize="small")


def main() -> None:
    """Write the picture."""
    fast = speeds()
    with looks():
        figure = Figure(figsize=(12.6, 3.6), layout="constrained")
        for axes, file in zip(figure.subplots(1, len(PARTS)), PARTS, strict=True):
            draw(axes, file, fast)
        save(figure, OUT)


if __name__ == "__main__":
    main()
