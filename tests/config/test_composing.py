"""Configs that are composed with less work."""

from __future__ import annotations

import shlex
from functools import partial

import pytest
from hydra import compose
from hydra.errors import HydraException

from nmrun.config import source
from nmrun.config.composing import Done, composed, composing

LINES = (
    "",
    "seed=3 output_dir=some/where",
    "recipe=step recipe.switch=0.5 optimizer=sgd optimizer.lr=1",
    "sparsity=3:16 '+sparsity.overrides={inner.1: 1\\:8}' ~track.also",
    "'sparsity={n: 1, m: 4}'",  # values for a group that has options
    "recipe=custom ++recipe._target_=a.b.Mine ++recipe.x=1 debug=fast trainer.epochs=7",
)


@pytest.mark.parametrize("line", LINES)
def test_values_on_a_config_of_before_are_what_hydra_composes(line: str) -> None:
    source.register()
    done: Done = {}
    words = shlex.split(line)
    with composing():
        for more in ([], ["trainer.epochs=99", "+note=mine"], []):
            assert composed([*words, *more], done) == compose("nmrun", [*words, *more])
    assert len(done) == 1


def test_what_hydra_refuses_is_refused_as_ever() -> None:
    source.register()
    with composing():
        for word in ("nonsense=1", "recipe=nonsense", "+seed=1", "seed=1,2", "seed=[1"):
            for made in (lambda words: composed(words, {}), partial(compose, "nmrun")):
                with pytest.raises(HydraException):
                    made([word])
