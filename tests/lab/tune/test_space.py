"""Where settings are looked for: what recipes declare, and what the command says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose

from nmrun.errors import ConfigError
from nmrun.lab.config import command_line, composition, precheck, schema
from nmrun.lab.config.composition import composing
from nmrun.lab.keys.options import recipe_facts
from nmrun.lab.tune import plan
from nmrun.ranges import among, between, log
from nmrun.recipes import RECIPES

composition.register()


def config(*words: str) -> schema.Config:
    with composing():
        return schema.check(compose("nmrun", list(words)))


def cells_of(folder: Path, words: str, *over: str) -> list[plan.TuningCell]:
    jobs = precheck.read([words.split()], multirun=True).jobs
    return plan.cells(folder, jobs, plan.read_space(over))


def test_a_recipe_is_tuned_over_the_learning_rate_and_what_its_class_declares():
    assert plan.space_of(config("recipe=dense", "optimizer.lr=0.01"), {}) == {
        "optimizer.lr": log(0.002, 0.05)
    }
    assert plan.space_of(config("recipe=sr_ste"), {}).keys() == {"optimizer.lr", "recipe.decay"}
    assert plan.space_of(config("recipe=step"), {})["recipe.switch"].values[0] == "auto"
    assert plan.space_of(config("recipe=mdgf_exponential"), {}).keys() == {
        *("optimizer.lr", "recipe.dense", "recipe.final")
    }


@pytest.mark.parametrize("name", RECIPES)
def test_what_recipes_declare_is_allowed(name):
    """Both ends, or every value, are in the setting's own range; so is the default in the space."""
    for field in recipe_facts(RECIPES[name]).keys.values():
        if (search := field.search) is not None:
            assert all(map(field.check.holds, search.values or (search.low, search.high)))
            assert field.default in search.values or search.low <= field.default


def test_the_command_wins_where_the_run_has_the_key():
    rate = "optimizer.lr=tag(log,interval(1e-4,1e-2))"
    space = plan.read_space([rate, "recipe.decay=interval(0,1)", "trainer.clip=0.5,1,2"])
    assert space == {
        "optimizer.lr": log(1e-4, 1e-2),
        "recipe.decay": between(0.0, 1.0),
        "trainer.clip": among(0.5, 1, 2),
    }
    assert plan.space_of(config("recipe=sr_ste"), space) == space
    assert "recipe.decay" not in plan.space_of(config("recipe=ste"), space)
    ratio = {"sparsity.pad": among(True, False)}
    assert "sparsity.pad" in plan.space_of(config("recipe=ste"), ratio)
    assert "sparsity.pad" not in plan.space_of(config("recipe=dense"), ratio)


TAKES = "^--over {}: it takes an interval or several values for a key of a group"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer.lr", "cannot be read as key=value"),
        ("optimizer.lr=0.1", TAKES),
        ("optimizer.lr=interval(1,0.1)", TAKES),
        ("optimizer.lr=tag(log,interval(0,0.1))", TAKES),
        ("seed=1,2", TAKES),
        ("init=a,b", TAKES),
        ("optimizer.lr=0.1,0.2 optimizer.lr=0.3,0.4", "^--over optimizer.lr is there twice$"),
    ],
)
def test_a_range_that_is_none_gets_a_line(words, message):
    with pytest.raises(ConfigError, match=message.format(re.escape(words))):
        plan.read_space(words.split())


GPT = "recipe=dense model=gpt_tiny dataset=stdlib_text optimizer=adamw"


@pytest.mark.parametrize(
    ("words", "over", "message"),
    [
        ("recipe=dense", "optimizer.lr=interval(-1,1)", "=-1.0: it takes a number above 0$"),
        ("recipe=dense", "optimizer.betas=[0.9,0.99],[0.9,2]", r"=\[0.9, ?2\]: it takes "),
        # null is what is usual with the model
        (GPT, "optimizer.decay=null,all", "=null stands for matrices;"),
        # without weight decay it does not matter what decays
        ("recipe=dense", "optimizer.decay=all,matrices", ": its values change no run"),
        ("recipe=dense", "track.tags=[a],[b]", ": its values change no run"),
        ("recipe=dense", "trainer.distill_weight=interval(0.1,0.9)", ": its values change no run"),
        ("recipe=dense,sr_ste", "recipe.deacy=1e-4,1e-3", ": .*did you mean recipe.decay"),
        ("recipe=dense", "recipe.decay=1e-4,1e-3", ": no such key; decay belongs to recipe=sr_ste"),
        (
            "recipe=sr_ste",
            "sparsity.exclude=auto,none",
            ": no such key; did you mean model.exclude",
        ),
        ("recipe=sr_ste", "trianer.clip=1,2", ": no such key; did you mean trainer.clip"),
    ],
)
def test_a_range_with_values_that_no_run_takes_is_refused_before_a_trial(
    words, over, message, tmp_path
):
    key, _, _ = over.partition("=")
    with pytest.raises(ConfigError, match=f"^--over {key}{message}"):
        cells_of(tmp_path, words, over)


def test_a_key_is_searched_where_it_changes_the_run(tmp_path):
    over = "optimizer.decay=all,matrices"
    adamw, adam = cells_of(tmp_path, "recipe=dense optimizer=adamw,adam", over)
    assert adamw.searched["optimizer.decay"].values == ("all", "matrices")
    assert {*adam.searched} == {"optimizer.lr"}


def test_keys_of_ones_own_recipe_are_searched_though_no_config_says_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("declares.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import Annotated\n"
        "from nmrun.ranges import log, number\n"
        "from nmrun.recipes.ste import STE\n"
        "@dataclass\n"
        "class Declares(STE):\n"
        "    strength: Annotated[float, number(0), log(0.1, 10)] = 0.5\n"
        "    other: float = 2.0\n"
    )
    words = " ".join(command_line.own_recipe(["recipe._target_=declares.Declares"]))
    (cell,) = cells_of(tmp_path, words, "recipe.other=1,2,3")
    assert cell.searched["recipe.strength"] == log(0.1, 10)
    assert cell.searched["recipe.other"] == among(1, 2, 3)
    assert cell.defaults["recipe.strength"] == 0.5
    one = config(*cell.with_settings([("recipe.strength", 3.0)]))
    assert one.plain["recipe"]["strength"] == 3.0


def test_cells_have_folders_of_their_own_whatever_the_punctuation(tmp_path):
    cells = cells_of(tmp_path, 'recipe=ste model.exclude=["a-b"],["a:b"],["c"]')
    folders = [cell.folder.name for cell in cells]
    assert len({*folders}) == 3
    alone = cells_of(tmp_path, 'recipe=ste model.exclude=["c"],["d"]')
    assert alone[0].folder.name == folders[2]


def test_settings_of_a_recipe_are_cells(tmp_path):
    words = "recipe=step recipe.window=full,partial trainer.epochs=1,2"
    cells = cells_of(tmp_path, words)
    assert {cell.name: cell.folder.name for cell in cells} == {
        f"step 2:4 {epochs} {window}": f"step-2-4-{epochs}-{window}"
        for window in ("full", "partial")
        for epochs in (1, 2)
    }


@pytest.mark.parametrize(
    ("value", "search", "end"),
    [
        (0.00477, log(0.0002, 0.005), "upper"),
        (0.00021, log(0.0002, 0.005), "lower"),
        (0.001, log(0.0002, 0.005), ""),
        (0.004, log(0.0002, 0.005), ""),
        (0.004, between(0.0, 1.0), "lower"),
        (0.96, between(0.0, 1.0), "upper"),
        ("auto", among("auto", 0.2), ""),
    ],
)
def test_what_lies_at_the_end_of_a_range(value, search, end):
    assert plan.at_edge(value, search) == end


@pytest.mark.parametrize(
    ("over", "value", "end"),
    [
        ("optimizer.weight_decay=interval(0,1)", 0.01, ""),
        ("optimizer.weight_decay=interval(0,1)", 0.99, "upper"),
        ("optimizer.weight_decay=interval(0.1,1)", 0.11, "lower"),
        ("recipe.decay=interval(0,1)", 0.0, ""),
        ("schedule.gamma=interval(0.5,1)", 1.0, ""),
    ],
)
def test_there_is_nothing_to_look_for_beyond_what_a_key_takes(over, value, end, tmp_path):
    words = "recipe=sr_ste optimizer=adamw schedule=multistep"
    (cell,) = cells_of(tmp_path, words, over)
    assert cell.edge(over.partition("=")[0], value) == end
