"""Hyperparameters read from the source of a recipe's class, and the config nodes made of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.object_type import ObjectType

from nmrun import recipes
from nmrun.lab.keys import fields
from nmrun.lab.words import composition, precheck, schema

composition.register()
BASE = """
import no_such_module_at_all
from typing import Annotated, ClassVar

from nmrun.ranges import FRACTION, number, one_of, whole

class Recipe:
    name: ClassVar[str]
    needs: "ClassVar[tuple[str, ...]]" = ()
    step: int = field(init=False)
    _private: int = 3

class Held(Recipe):
    interval: Annotated[int, whole(1)] = 1
    dense: Annotated[float, FRACTION] = 0.0
"""
MINE = """
from typing import Annotated, ClassVar
import typing

from nmrun import ranges
from sample_recipes import base
from sample_recipes.base import Recipe
from nmrun.ranges import number, one_of

class Scaled:
    scale: typing.Annotated[float, number(0, open_low=True, optional=True)] = None

class Mine(Scaled, base.Held):
    name: ClassVar[str] = "mine"
    dense: Annotated[float, number(0, 0.5)] = 0.25
    span: tuple[float, float] = (100.0, 5.0)
    gradient: "Annotated[str, one_of('ste', 'masked')]" = "ste"
    strength: Annotated[float, ranges.number(0)] = 0.5
    power: Annotated[float, POWERS] = 2.0
    made: list = field(default_factory=list)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "sample_recipes"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "base.py").write_text(BASE)
    (folder / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sample_recipes", raising=False)
    return "sample_recipes.mine.Mine"


def test_the_fields_of_a_class_and_its_bases(mine):
    keys = fields.recipe_fields(mine)
    assert {name: field.default for name, field in keys.items()} == {
        "interval": 1,
        "dense": 0.25,
        "scale": None,
        "span": [100.0, 5.0],
        "gradient": "ste",
        "strength": 0.5,
        "power": 2.0,
    }
    assert "sample_recipes.base" not in sys.modules  # it could not be imported
    allowed = {name: field.check and field.check.allowed for name, field in keys.items()}
    assert allowed == {
        "interval": "a whole number, 1 or more",
        "dense": "a number at least 0 and at most 0.5",
        "scale": "a number above 0, or null",
        "span": None,
        "gradient": "one of ste, masked",
        "strength": "a number at least 0",
        "power": None,  # of a name that only the module has
    }


def test_a_class_that_is_not_there(mine):
    with pytest.raises(LookupError, match=r"sample_recipes\.mine has no class Nothing"):
        fields.recipe_fields("sample_recipes.mine.Nothing")
    with pytest.raises(LookupError, match=r"no module sample_recipes\.none"):
        fields.recipe_fields("sample_recipes.none.Nothing")


@pytest.fixture
def without_file(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in recipe ``mine``."""
    monkeypatch.setitem(recipes.RECIPES, "mine", mine)


def test_a_recipe_without_a_file_is_served(without_file):
    offered = composition.ClassSource("nmrun", "nm://")
    assert offered.list("recipe", ObjectType.CONFIG) == [*recipes.RECIPES, "custom"]
    assert "mine" in recipes.RECIPES
    assert offered.is_config("recipe/mine.yaml")
    assert not offered.is_config("recipe/nothing")
    with initialize_config_module("nmrun.conf", version_base="1.3"):
        config = schema.check(compose("nmrun", ["recipe=mine", "recipe.dense=0", "recipe.scale=2"]))
    assert config.plain["recipe"] == {
        "name": "mine",
        "interval": 1,
        "dense": 0.0,
        "scale": 2.0,
        "span": [100.0, 5.0],
        "gradient": "ste",
        "strength": 0.5,
        "power": 2.0,
    }
    assert config.recipe.options["scale"] == 2.0


def test_its_ranges_are_those_of_the_class(without_file):
    line = "recipe=mine recipe.dense=0.6 recipe.gradient=mask recipe.intervall=3"
    assert precheck.look(line.split()).problems == [
        "recipe.intervall: no such key; did you mean recipe.interval?"
        " (recipe has dense, gradient, interval, name, power, scale, span, strength)",
        "recipe.dense=0.6: it takes a number at least 0 and at most 0.5",
        "recipe.gradient=mask: it takes one of ste, masked; did you mean masked?",
    ]
    (problem,) = precheck.look(["recipe=mien"]).problems
    assert problem.startswith("recipe=mien: no such recipe; did you mean mine?")
