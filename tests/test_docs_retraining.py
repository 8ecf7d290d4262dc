"""docs/results/retraining.md is computed from its committed runs and trials."""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/results"
PLACE = ("recipe", "init", "sparsity", "trainer.distill", "recipe.masks")

Run = dict[str, str]


def read(name: str) -> list[Run]:
    with (FOLDER / name).open() as file:
        return list(csv.DictReader(file))


def perplexity(run: Run) -> float:
    return float(run["eval/perplexity"])


def by_place() -> dict[tuple[str, ...], list[Run]]:
    groups: dict[tuple[str, ...], list[Run]] = {}
    for trial in read("retraining_trials.csv"):
        groups.setdefault(tuple(trial[key] for key in PLACE), []).append(trial)
    return groups


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


def test_a_teacher_brings_more_than_the_choice_of_recipe():
    """From SparseGPT's networks: the least that it brings a recipe's mean, and how far recipes lie
    apart without it.
    """
    means: dict[tuple[str, str, str], list[float]] = {}
    for run in trained():
        if run["init"] == "sparsegpt":
            place = run["sparsity"], run["trainer.distill"], run["recipe"]
            means.setdefault(place, []).append(float(run["test/perplexity"]))
    mean = {place: sum(values) / len(values) for place, values in means.items()}
    for ratio in ("2:4", "4:8", "1:4"):
        alone = {
            recipe: value for (at, by, recipe), value in mean.items() if (at, by) == (ratio, "null")
        }
        taught = {
            recipe: value
            for (at, by, recipe), value in mean.items()
            if (at, by) == (ratio, "dense")
        }
        assert min(alone[recipe] - taught[recipe] for recipe in taught) > max(alone.values()) - min(
            alone.values()
        )
