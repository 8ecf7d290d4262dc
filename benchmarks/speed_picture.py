"""Draw speed against ratio from committed results: inference of an encoder beside the best dense one
in each precision, and training steps, on one CPU.

python benchmarks/speed_picture.py     # writes docs/pictures/speed.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun.lab.render.style import COLOURS, GREY, looks, save

HERE = Path(__file__).parent / "results"
OUT = Path(__file__).parents[1] / "docs" / "pictures" / "speed.svg"
RATIOS = ["2:4", "1:4", "1:8", "1:16"]
Line = dict[str, tuple[float, float, float]]  # by ratio: median and quartiles


def training(file: str) -> Line:
    """Read the times as fast as dense of a whole training step."""
    rows = json.loads((HERE / file).read_text())["rows"]
    return {
        row["sparsity"]: (row["speedup"], row["speedup_q1"], row["speedup_q3"])
        for row in rows
        if row["arm"] == "accelerated"
    }


def inference(sequences: int, precision: str, base: str) -> tuple[Line, str]:
    """Read the same of a forward pass of so many sequences over a dense arm, and the arm's name."""
    rows: list[dict[str, Any]] = json.loads((HERE / "infer_1_threads_cpu.json").read_text())["rows"]
    packed = [
        row
        for row in rows
        if (row["sequences"], row["arm"], row.get("precision")) == (sequences, "packed", precision)
    ]
    key = f"over_{base}"
    line = {row["pattern"]: (row[key], row[f"{key}_q1"], row[f"{key}_q3"]) for row in packed}
    return line, packed[0][f"{key}_by"]


def draw(axes: Axes, lines: dict[str, Line], title: str) -> None:
    """One part of the picture."""
    for colour, marker, (name, line) in zip(COLOURS, "osD^", lines.items(), strict=False):
        middle = [line[ratio][0] for ratio in RATIOS]
        spread = [
            [line[ratio][0] - line[ratio][1] for ratio in RATIOS],
            [line[ratio][2] - line[ratio][0] for ratio in RATIOS],
        ]
        axes.errorbar(RATIOS, middle, spread, color=colour, marker=marker, capsize=3, label=name)
        axes.annotate(
            f"{middle[-1]:.1f}", (3, middle[-1]), (8, -3), textcoords="offset points", color=colour
        )
    axes.axhline(1, color=GREY, linestyle="--")
    axes.set(xlabel="N:M", ylim=(0, None), title=title)
    axes.legend(loc="upper left", fontsize="small")


def main() -> None:
    """Write the picture."""
    names = {
        "onnxruntime": "ONNX Runtime",
        "openvino": "OpenVINO",
        "onednn": "oneDNN",
        "compiled": "torch.compile",
    }
    lines: dict[str, Line] = {}
    for precision in ("float32", "bf16", "int8"):
        line, by = inference(1, precision, precision)
        lines[f"{precision} over {names.get(by, by)}'s"] = line
    steps = {
        "float32 over the best float32": training("train_by_ratio_cpu.json"),
        "bf16 over dense bf16, both compiled": training("train_bf16_by_ratio_cpu.json"),
    }
    with looks():
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        draw(left, lines, "inference, BERT-base, 1 x 128 tokens")
        draw(right, steps, "training step, GPT, 6 layers of width 512")
        left.set_ylabel("times as fast as dense")
        OUT.parent.mkdir(exist_ok=True)
        save(figure, OUT)


if __name__ == "__main__":
    main()
