"""Draw the perplexity of every way to a sparse network from committed results: one-shot pruning and
retraining or mask learning, with its CPU seconds.

python docs/pictures/retraining.py     # writes docs/pictures/retraining.svg
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmrun.lab.compare.notation import written
from nmrun.lab.render.style import COLOURS, GREY, looks, save

DOCS = Path(__file__).parents[1]
RECIPES = (
    "asp", "slope", "sqft", "sr_ste", "ast", "cast", "step", "s_ste", "maskllm", "proxsparse", "dense"
)  # fmt: skip
STARTS = {
    "dense": ("from the dense network", COLOURS[0], "o"),
    "sparsegpt": ("from SparseGPT's network", COLOURS[1], "s"),
}
Place = tuple[str, str, str]  # recipe, start, teacher


def perplexities(ratio: str) -> dict[Place, float]:
    """Read the mean over networks by recipe, start and teacher."""
    found = defaultdict(list)
    with (DOCS / "results" / "retraining.csv").open() as file:
        for run in csv.DictReader(file):
            if run["sparsity"] in (ratio, "dense") and run["recipe.masks"] == "null":
                place = run["recipe"], run["init"], run["trainer.distill"]
                found[place].append(float(run["test/perplexity"]))
    return {key: mean(values) for key, values in found.items()}


def draw(axes: Axes, found: dict[Place, float], ratio: str) -> None:
    """Draw one ratio: a row a recipe, a colour a start, hollow with a teacher."""
    axes.axvline(found["dense", "null", "null"], color=GREY, linestyle="--")
    axes.axvline(found["sparsegpt", "dense", "null"], color=COLOURS[2], linestyle=":")
    for (recipe, start, teacher), perplexity in found.items():
        if recipe in RECIPES and start in STARTS:
            _, colour, marker = STARTS[start]
            fill = "none" if teacher == "dense" else colour
            row = RECIPES.index(recipe)
            axes.plot(perplexity, row, marker, color=colour, markerfacecolor=fill)
    axes.set(title=ratio, xlabel="test perplexity", ylim=(len(RECIPES) - 0.5, -0.5), xscale="log")
    ticks = {"2:4": (6.6, 6.8, 7), "1:4": (7, 8, 9, 10)}[ratio]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def main() -> None:
    """Write the picture."""
    with (DOCS / "results" / "retraining_cost.csv").open() as file:
        cost = {row["recipe"]: float(row["cpu_seconds"]) for row in csv.DictReader(file)}
    with looks():
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, ratio in zip(panels, ("2:4", "1:4"), strict=True):
            draw(axes, perplexities(ratio), ratio)
        names = [f"{written(recipe)}, {cost[recipe]:.1f} s" for recipe in RECIPES]
        panels[0].set_yticks(range(len(RECIPES)), names)
        taught = cost["asp_taught"] - cost["asp"]
        axes = panels[1]
        axes.plot([], [], "--", color=GREY, label="the dense network")
        axes.plot([], [], ":", color=COLOURS[2], label=f"SparseGPT, {cost['sparsegpt']:.1f} s")
        for name, colour, marker in STARTS.values():
            axes.plot([], [], marker, color=colour, label=name)
        axes.plot(
            [],
            [],
            "o",
            color=GREY,
            markerfacecolor="none",
            label=f"with a teacher, {taught:.1f} s more",
        )
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        save(figure, DOCS / "pictures" / "retraining.svg")


if __name__ == "__main__":
    main()
