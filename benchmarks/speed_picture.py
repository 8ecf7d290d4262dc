"""Draw speed against ratio from committed results: training steps and inference on a CPU.

python benchmarks/speed_picture.py     # writes docs/pictures/speed.svg
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from matplotlib.figure import Figure

from nmrun.lab.show.style import COLOURS, GREY, looks

HERE = Path(__file__).parent / "results"
OUT = Path(__file__).parents[1] / "docs" / "pictures" / "speed.svg"
RATIOS = ["2:4", "1:4", "1:8", "1:16"]
Line = dict[str, tuple[float, float, float]]  # by ratio: median and quartiles


def training() -> Line:
    """Read the times as fast as dense of a whole training step."""
    rows = json.loads((HERE / "train_by_ratio_cpu.json").read_text())["rows"]
    return {
        row["sparsity"]: (row["speedup"], row["speedup_q1"], row["speedup_q3"])
        for row in rows
        if row["arm"] == "accelerated"
    }


def inference(tokens: int) -> Line:
    """Read the same of a forward pass of so many tokens, over torch, one thread."""
    with (HERE / "cpu_inference.csv").open() as file:
        return {
            row["pattern"]: tuple(
                map(float, (row["speedup"], row["speedup_q1"], row["speedup_q3"]))
            )
            for row in csv.DictReader(file)
            if row["model"] == "transformer" and row["arm"] == "packed"
            if (row["threads"], row["tokens"]) == ("1", str(tokens))
        }


def main() -> None:
    """Write the picture."""
    lines = {
        "inference, 64 tokens": inference(64),
        "inference, 512 tokens": inference(512),
        "inference, one token": inference(1),
        "training step": training(),
    }
    with looks():
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for colour, marker, (name, line) in zip(COLOURS, "osD^", lines.items(), strict=False):
            middle = [line[ratio][0] for ratio in RATIOS]
            spread = [
                [line[ratio][0] - line[ratio][1] for ratio in RATIOS],
                [line[ratio][2] - line[ratio][0] for ratio in RATIOS],
            ]
            axes.errorbar(
                RATIOS, middle, spread, color=colour, marker=marker, capsize=3, label=name
            )
            axes.annotate(
                f"{middle[-1]:.1f}",
                (3, middle[-1]),
                (8, -3),
                textcoords="offset points",
                color=colour,
            )
        axes.axhline(1, color=GREY, linestyle="--")
        axes.annotate("dense", (0, 1), (-14, -11), textcoords="offset points", color=GREY)
        axes.set(ylabel="times as fast as dense", xlabel="N:M", ylim=(0.6, None))
        axes.set_title("A Transformer, 6 layers of width 512, on a CPU (AMD EPYC, Zen 4)")
        axes.legend(loc="upper left")
        OUT.parent.mkdir(exist_ok=True)
        figure.savefig(OUT)


if __name__ == "__main__":
    main()
