"""What the classes of recipes say of themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nmrun import recipes, registry
from nmrun.lab.keys.options import Field, of_class, recipe_facts

MINE = """
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun import ranges
from nmrun.ranges import FRACTION, number, one_of, whole
from nmrun.recipes.base import Recipe

POWERS = number(1, 3)

@dataclass
class Held(Recipe):
    \'\'\'Held.

    Args:
        interval: steps that a mask stays.
    \'\'\'
    interval: Annotated[int, whole(1)] = 1
    dense: Annotated[float, FRACTION] = 0.0

@dataclass
class Mine(Held):
    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "M-INE"
    masks_are_largest: ClassVar[bool] = True

    dense: Annotated[float, number(0, 0.5)] = 0.25
    span: tuple[float, float] = (100.0, 5.0)
    gradient: Annotated[str, one_of('ste', 'masked')] = "ste"
    power: Annotated[float, POWERS] = 2.0

@dataclass
class Variant(Mine):
    name: ClassVar[str] = "variant"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sample_recipes.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sample_recipes", raising=False)
    recipe_facts.cache_clear()
    return "sample_recipes.Mine"


def told(field: Field) -> tuple[object, ...]:
    allowed = None if field.check is None else field.check.allowed
    return field.default, allowed, str(field.search), field.meaning


@pytest.mark.parametrize("path", recipes.RECIPES.values())
def test_what_is_known_without_an_import_is_what_the_class_says(path):
    """If not: ``python docs/generate.py``."""
    known, kind = recipe_facts(path), registry.imported(path, path)
    own = of_class(kind)
    assert [(key, told(field)) for key, field in known.keys.items()] == [
        (key, told(field)) for key, field in own.keys.items()
    ]
    assert (known.title, known.takes_blocks) == (own.title, own.takes_blocks)
    assert (known.about, known.module) == (own.about, own.module)


def test_the_keys_of_a_class_and_its_bases(mine):
    keys = recipe_facts(mine).keys
    assert {key: told(field)[:2] for key, field in keys.items()} == {
        "interval": (1, "a whole number, 1 or more"),
        "dense": (0.25, "a number at least 0 and at most 0.5"),
        "span": ([100.0, 5.0], None),
        "gradient": ("ste", "one of ste, masked"),
        "power": (2.0, "a number at least 1 and at most 3"),
    }
    assert keys["interval"].meaning == "steps that a mask stays."
    titles = [recipe_facts(path).title for path in (mine, "sample_recipes.Variant")]
    assert titles == ["M-INE", "variant"]  # not that of the class above it


def test_a_class_that_is_not_there(mine):
    for path in ("sample_recipes.Nothing", "no_such_recipes.Nothing"):
        with pytest.raises(ValueError, match="cannot be imported"):
            recipe_facts(path)
