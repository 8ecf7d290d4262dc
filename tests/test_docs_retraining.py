"""docs/results/retraining.md is computed from its committed runs and trials."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/results"
TEXT = (FOLDER / "retraining.md").read_text()
PLACE = ("recipe", "init", "sparsity", "trainer.distill", "recipe.masks")
# the page's word for a recipe's own parameter, and the values that it comes with
OWN = {
    "STEP": ("step", "recipe.switch", "auto"),
    "S-STE": ("s_ste", "", ""),
    "AST": ("ast", "recipe.decay", "0.0001"),
    "SR-STE": ("sr_ste", "recipe.decay", "0.0002"),
    "SQFT": ("sqft", "recipe.rank", "32"),
    "MaskLLM": ("maskllm", "recipe.prior", "3.0"),
    "ProxSparse": ("proxsparse", "recipe.strength", "0.25"),
}
LEARN_MASKS = {"maskllm": "MaskLLM", "proxsparse": "ProxSparse"}
OF_S_STE = {"recipe.gamma": "0.0", "recipe.beta": "null", "recipe.interval": "null"}

Run = dict[str, str]


def read(name: str) -> list[Run]:
    with (FOLDER / name).open() as file:
        return list(csv.DictReader(file))


def perplexity(run: Run) -> float:
    return float(run["eval/perplexity"])


def by_place() -> dict[tuple[str, ...], list[Run]]:
    found: dict[tuple[str, ...], list[Run]] = {}
    for trial in read("retraining_trials.csv"):
        found.setdefault(tuple(trial[key] for key in PLACE), []).append(trial)
    return found


def trained() -> list[Run]:
    return [run for run in read("retraining.csv") if run["trainer.limit_batches"] == "98"]


def options(run: Run) -> Run:
    return {key: value for key, value in run.items() if key.startswith("recipe.")}


def test_its_runs_have_the_settings_that_were_best_in_the_trials():
    """On the validation text, and the learning rate at no end of those tried with these options."""
    places = by_place()
    for run in trained():
        every = places[tuple(run[key] for key in PLACE)]
        best = min(every, key=perplexity)
        assert options(best) == options(run)
        assert best["optimizer.lr"] == run["optimizer.lr"]
        rates = [float(trial["optimizer.lr"]) for trial in every if options(trial) == options(run)]
        assert min(rates) < float(run["optimizer.lr"]) < max(rates)


def test_its_table_of_trials_is_that_of_the_file():
    places = by_place()
    rows = [re.split(r" *\| *", line)[1:-1] for line in TEXT.splitlines() if " → " in line]
    assert rows
    for name, start, *shown in rows:
        recipe, key, usual = OWN[name]
        start = {"dense": "dense", "SparseGPT's": "sparsegpt"}[start]
        for ratio, cell in zip(("2:4", "1:4"), shown, strict=True):
            every = places[recipe, start, ratio, "null", "null"]
            as_it_comes = [
                trial
                for trial in every
                if (trial[key] == usual if key else OF_S_STE.items() <= trial.items())
            ]
            best = min(every, key=perplexity)
            value = best[key] if key else _changed(best)
            if recipe == "step" and best["recipe.decay"] != "0.0":
                value += f", decay {best['recipe.decay']}"
            first, least = perplexity(min(as_it_comes, key=perplexity)), perplexity(best)
            rate = f"{float(best['optimizer.lr']):g}"
            assert cell == f"{value} at {rate}: {first:.2f} → {least:.2f} ({len(every)})"


def _changed(trial: Run) -> str:
    """The option of S-STE that is not as it comes."""
    own = [f"{k.partition('.')[2]} {trial[k]}" for k, v in OF_S_STE.items() if trial[k] != v]
    return own[0] if own else "as it comes"


def test_its_seconds_are_those_of_the_file():
    cost = {row["recipe"]: float(row["cpu_seconds"]) for row in read("retraining_cost.csv")}
    recipes = {run["recipe"] for run in trained()}
    retrained = [cost[name] for name in recipes - set(LEARN_MASKS)]
    assert f"| SparseGPT | 128 texts, forward | {cost['sparsegpt']:.1f} |" in TEXT
    assert f"| {min(retrained):.1f} to {max(retrained):.1f} |" in TEXT
    for recipe, name in LEARN_MASKS.items():
        assert re.search(rf"^\| {name} \|.*\| {cost[recipe]:.1f} \|$", TEXT, re.M)
    assert f"| {cost['asp_taught'] - cost['asp']:.1f} more |" in TEXT
