"""Whatever is typed wrong: one line that says what is meant, status 2, at once, nothing written."""

from __future__ import annotations

import inspect
import json
from typing import Any

import bad_inputs
import pytest
from runs import mistakes
from verbs import python

from nmrun import recipes
from nmrun.lab.config import schema
from nmrun.lab.keys import options
from nmrun.lab.keys.datasets import IMAGES, RUNNING_TEXT, TEXTS
from nmrun.lab.keys.options import find_builder
from nmrun.papers.reading import QUESTIONS
from nmrun.papers.text_to_text import ANSWERED
from nmrun.papers.translation import PAIRS
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All lines answered by one process without a GPU and without data."""
    places = {"NMRUN_DATA": "/nowhere", "CUDA_VISIBLE_DEVICES": ""}
    place = tmp_path_factory.mktemp("typed")
    process = python(bad_inputs.__file__, cwd=place, timeout=300, **places)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.slow
def test_a_mistake_gets_one_line(answers):
    assert list(answers) == list(bad_inputs.EVERY)
    wrong = [
        (line, answer)
        for line, answer in answers.items()
        if answer["status"] != 2
        or answer["printed"]
        or not answer["said"].startswith("nmrun: ")
        or answer["said"].count("\n") != 1
        or bad_inputs.EVERY[line] not in answer["said"]
        or answer["imported"]
        or answer["left"] != sorted(bad_inputs.FILES)
    ]
    assert wrong == []


# the arguments of each builder that the data give
GIVEN = {
    IMAGES: {"shape", "classes"},
    TEXTS: {"vocabulary", "classes"},
    RUNNING_TEXT: {"vocabulary", "context"},
    QUESTIONS: {"vocabulary", "max_length"},
    ANSWERED: {"vocabulary", "max_length"},
}


@pytest.mark.parametrize("name", [name for name in options.names("model") if "fairseq" not in name])
def test_what_a_model_takes_is_what_its_builder_asks_for(name):
    asked = set(inspect.signature(find_builder("model", name)).parameters)
    fitting = [data for data, needs in GIVEN.items() if needs <= asked]
    assert options.kind("model", name).data in fitting


def test_models_of_fairseq_take_pairs_of_sentences():
    names = [name for name in options.names("model") if "fairseq" in name]
    assert {options.kind("model", name).data for name in names} == {PAIRS}


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["track=local", "track.also=[tensorboard,mlflow]"], "track=tensorboard"),
        (["model=timm", "track=local"], "model=timm"),
        (["dataset=hub_text", "dataset.path=x", "model=gpt_tiny", "track=local"], "dataset=hub_text"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_installed(words, option, monkeypatch):
    there = dict.fromkeys(schema.PACKAGES, ("json", "more"))
    monkeypatch.setattr(schema, "PACKAGES", {**there, option: ("no_such_package", "some")})
    (problem,) = mistakes(words)
    assert f"{option} needs no_such_package" in problem
    assert "'.[some]'" in problem


@pytest.mark.parametrize("word", ["slurm", "submitit_slurm"])
def test_slurm_where_there_is_none(word, tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = [f"hydra/launcher={word}", "seed=0,1", "track=local"]
    assert mistakes(words, multirun=True) == [
        f"launcher={word}: there is no sbatch here; joblib needs no cluster"
    ]


@pytest.mark.parametrize("name", [*recipes.RECIPES])
def test_blocks_of_rows_are_refused_as_the_recipe_itself_would(name):
    recipe = recipes.build(name, {})
    recipe.begin(Pattern.parse("4:2:8"), 1000)
    itself = name != "dense" and not _takes_blocks(recipe)
    problems = mistakes([f"recipe={name}", "sparsity=4:2:8", "track=local"])
    assert any("V:N:M" in problem for problem in problems) == itself


def _takes_blocks(recipe: Recipe) -> bool:
    try:
        recipe.check_blocks(recipe.pattern)
    except ValueError:
        return False
    return True
