"""Draw perplexity against cost from committed results: one-shot pruning, retraining, dense training.

python benchmarks/retraining_picture.py     # writes docs/pictures/retraining.svg
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun.report.names import written
from nmrun.report.style import COLOURS, GREY, MARKERS, looks

DOCS = Path(__file__).parents[1] / "docs"
ONE_SHOT = ("magnitude", "wanda", "ria", "sparsegpt")
RETRAINED = ("asp", "sr_ste", "step", "s_ste", "slope", "ast", "cast")
STARTS = {
    "dense": ("the dense network", COLOURS[0]),
    "sparsegpt": ("SparseGPT's network", COLOURS[1]),
}
TRAINING = 50.0  # CPU seconds of the dense training (docs/results/retraining.md)


def perplexities(ratio: str) -> dict[tuple[str, str], float]:
    """Read the mean over networks by recipe and start, without a teacher."""
    found = defaultdict(list)
    with (DOCS / "results" / "retraining.csv").open() as file:
        for run in csv.DictReader(file):
            if run["sparsity"] in (ratio, "dense") and run["trainer.distill"] == "null":
                found[run["recipe"], run["init"]].append(float(run["test/perplexity"]))
    return {key: mean(values) for key, values in found.items()}


def draw(axes: Axes, ratio: str, cost: dict[str, float]) -> None:
    """Draw one ratio: a marker a recipe, a colour a start."""
    found = perplexities(ratio)
    axes.axhline(found["dense", "null"], color=GREY, linestyle="--")
    axes.plot(TRAINING, found["dense", "null"], "*", color=GREY, markersize=9)
    for recipe in ONE_SHOT:
        place = cost[recipe], found[recipe, "dense"]
        axes.plot(*place, "x" if recipe != "sparsegpt" else "p", color=COLOURS[2])
    for (start, (_, colour)), (marker, recipe) in (
        (start, kind) for start in STARTS.items() for kind in zip(MARKERS, RETRAINED, strict=False)
    ):
        if (recipe, start) in found:
            seconds = cost[recipe] + (cost["sparsegpt"] if start == "sparsegpt" else 0.0)
            axes.plot(seconds, found[recipe, start], marker, color=colour)
    axes.set(xscale="log", yscale="log", xlim=(0.3, 80), xlabel="CPU seconds", title=ratio)


def main() -> None:
    """Write the picture."""
    with (DOCS / "results" / "retraining_cost.csv").open() as file:
        cost = {row["recipe"]: float(row["cpu_seconds"]) for row in csv.DictReader(file)}
    with looks():
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        for axes, ratio in zip(figure.subplots(1, 2), ("2:4", "1:4"), strict=True):
            draw(axes, ratio, cost)
            ticks = {"2:4": (6.6, 6.8, 7.0, 7.2, 7.4, 7.6), "1:4": (7, 8, 9, 10, 12, 15)}[ratio]
            axes.set_yticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xticks((0.5, 1, 5, 10, 50), ("0.5", "1", "5", "10", "50"))
        axes.plot([], [], "*", color=GREY, label="dense training")
        axes.plot([], [], "x", color=COLOURS[2], label="one-shot")
        axes.plot([], [], "p", color=COLOURS[2], label="SparseGPT")
        for name, colour in STARTS.values():
            axes.plot([], [], "s", color=colour, label=f"from {name}")
        for marker, recipe in zip(MARKERS, RETRAINED, strict=False):
            axes.plot([], [], marker, color=GREY, label=written(recipe))
        figure.axes[0].set_ylabel("test perplexity")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.savefig(DOCS / "pictures" / "retraining.svg")


if __name__ == "__main__":
    main()
