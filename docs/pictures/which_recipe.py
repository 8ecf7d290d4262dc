"""Draws which_recipe.svg, the change against dense training of every recipe in every comparison,
from the committed runs. From the checkout's root:

python docs/pictures/which_recipe.py
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import nmrun
from nmrun.lab.render.style import INK, for_dark_pages

DOCS = Path(__file__).parents[1]
RATIOS = ("2:4", "1:4", "1:8", "1:16")
RECIPES = {
    "asp": "ASP",
    "ste": "STE",
    "sr_ste": "SR-STE",
    "step": "STEP",
    "s_ste": "S-STE",
    "mdgf_exponential": "MdGf",
    "sdgf_stepwise": "SdGf",
}
# Bytes that a weight takes in training, in float32 under Adam: itself, its gradient, two moments and
# the masked weight; of ASP its fixed mask too. A dense one takes 16.
BYTES = {name: 21 if name == "asp" else 20 for name in RECIPES}
MOST = 8.0  # deviations of a run, at which the colours end


@dataclass(frozen=True)
class Task:
    """A column of the picture for each ratio.

    Attributes:
        title: what was trained, on what, and how.
        file: of its runs, below ``docs/results``.
        unit: of a difference, as the title names it.
        scale: by what a difference is multiplied; negative where lower is better.
        optimizer: which of its runs.
        ratios: at which it was run.
        tuned: whether each recipe had trials; without, its rate is dense training's.
    """

    title: str
    file: str
    unit: str
    scale: float
    optimizer: str = ""
    ratios: tuple[str, ...] = RATIOS
    tuned: bool = True

    @property
    def path(self) -> Path:
        return DOCS / "results" / f"{self.file}.csv"

    @property
    def digits(self) -> int:
        return 2 if self.scale == -1 else 1


TASKS = (
    Task("ResNet-8, Adam\na tenth of CIFAR-10", "images", "points", 100, "adam"),
    Task("ResNet-8, SGD\na tenth of CIFAR-10", "images", "points", 100, "sgd"),
    Task("GPT, 0.4M weights\nShakespeare", "language", "perplexity", -1),
    Task("GPT, 0.4M weights\nWikiText-2", "wikitext", "perplexity", -1),
    Task("Transformer, 0.9M\nMulti30k", "translation", "BLEU", 1),
    Task("MiniLM, fine-tuned\n2,000 texts of SST-2", "finetuning", "points", 100),
    Task("ResNet-18\nuntuned", "resnet18", "points", 100, ratios=("1:8",), tuned=False),
)


def cells(task: Task) -> pd.DataFrame:
    """The differences to dense training, seed by seed, positive where the recipe is better: by
    recipe and ratio, with the p-value, the deviation of a dense run and the mean of these runs.
    """
    chosen = [f"optimizer={task.optimizer}"] if task.optimizer else []
    found = nmrun.table(task.path, baseline="dense", filter=chosen)
    spread = found[found.recipe != "dense"].groupby("sparsity").sd.median()
    found["dense"] = found["mean"][found.recipe == "dense"].iloc[0] * abs(task.scale)
    found = found[found.recipe.isin(RECIPES)].set_index(["recipe", "sparsity"])
    found["shown"] = found.difference * task.scale
    found["deviations"] = [
        math.copysign(1, task.scale) * row.difference / spread[ratio]
        for (_, ratio), row in found.iterrows()
    ]
    return found


def multiplications(ratio: str) -> dict[str, float]:
    """The multiplications of training over the dense ones, at a ratio: means over the tuned tasks."""
    shares: dict[str, list[float]] = {}
    for task in [task for task in TASKS if task.tuned]:
        runs = nmrun.runs(task.path)
        runs = runs[runs.sparsity == ratio]
        share = runs["flops/training_arithmetic"] / runs["flops/training_dense"]
        for recipe, mean in share.groupby(runs.recipe).mean().items():
            shares.setdefault(str(recipe), []).append(mean)
    return {recipe: sum(means) / len(means) for recipe, means in shares.items()}


def draw(axes: Axes) -> None:
    left = 0.0
    for task in TASKS:
        found, wide = cells(task), max(len(task.ratios), 3)  # the title needs three
        middle = left + (wide - 1) / 2
        below = f"{task.unit}; dense {found.dense.iloc[0]:.{task.digits - 1}f}"
        axes.text(middle, -1.9, task.title, ha="center", va="bottom", fontsize=7)
        axes.text(middle, -1.55, below, ha="center", va="center", fontsize=6.5)
        for column, ratio in enumerate(task.ratios):
            x = middle + column - (len(task.ratios) - 1) / 2
            axes.text(x, -0.85, ratio, ha="center", va="center", fontsize=7)
            for row, recipe in enumerate(RECIPES):
                if (recipe, ratio) in found.index:
                    cell(axes, x, row, found.loc[recipe, ratio], task.digits)
        left += wide + 0.4
    end = left
    for column, (title, texts) in enumerate(prices()):
        axes.text(end + 1.5 * column, -0.85, title, ha="center", va="bottom", fontsize=6.5)
        for row, recipe in enumerate(RECIPES):
            axes.text(end + 1.5 * column, row, texts[recipe], ha="center", va="center", fontsize=7)
    for row, name in enumerate(RECIPES.values()):
        axes.text(-0.8, row, name, ha="right", va="center", fontsize=8)
    axes.set(xlim=(-3.3, end + 3.9), ylim=(len(RECIPES) - 0.4, -3))
    axes.axis("off")


def cell(axes: Axes, x: float, y: float, found: pd.Series, digits: int) -> None:
    depth = max(-1.0, min(1.0, found.deviations / MOST))
    colour = matplotlib.colormaps["PuOr"](0.5 + 0.4 * depth)
    axes.add_patch(matplotlib.patches.Rectangle((x - 0.5, y - 0.5), 1, 1, color=colour, lw=0))
    ink = "white" if abs(depth) > 0.85 else "black"  # the cell's own, on light and dark pages
    text = f"{found.shown:+.{digits}f}".replace("-", "\N{MINUS SIGN}")
    axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=ink)
    if found.p < 0.05:
        axes.plot(x + 0.36, y - 0.32, "o", color=ink, markersize=1.8)


def prices() -> Iterator[tuple[str, dict[str, str]]]:
    """What a recipe costs: multiplications of training at 1:8, memory, and how many settings the trials
    searched beside the learning rate.
    """
    shares = multiplications("1:8")
    yield "multipli-\ncations\nat 1:8", {name: f"{share:.2f}" for name, share in shares.items()}
    yield "bytes a\nweight", {name: str(count) for name, count in BYTES.items()}
    runs = pd.read_csv(TASKS[0].path, low_memory=False)
    searched = runs.groupby("recipe")["tuned.over"].first()
    yield "to\ntune", {name: str(searched[name].count(";")) for name in RECIPES}


def main() -> None:
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "which",
            "svg.fonttype": "path",
            "font.family": "DejaVu Sans",
            "text.color": INK,
        }
    ):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        draw(figure.subplots())
        place = DOCS / "pictures" / "which_recipe.svg"
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        place.write_bytes(for_dark_pages(buffer.getvalue()))


if __name__ == "__main__":
    main()
