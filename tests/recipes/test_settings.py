"""What recipes take where nothing is said, as their papers have it, and how they show themselves."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from nmrun import recipes
from nmrun.errors import ConfigError
from nmrun.ranges import checks

# of the papers or their code (docs/recipes says which); MaskLLM's dense start is ours
PAPERS: dict[str, dict[str, Any]] = {
    "sr_ste": {"decay": 2e-4},
    "step": {"switch": "auto", "t_min": 0.1, "t_max": 0.5, "eps_mode": "inside", "decay": 0.0},
    "bi_mask": {"interval": 100, "candidates": 100},
    "sdgf_geometric": {"frames": 4},
    "lbc": {"t_i": 0.0, "t_f": 0.5},
    "maskllm": {
        **{"kappa": (100.0, 500.0), "temperature": (4.0, 0.05)},
        **{"prior": 3.0, "reg": 1e-5, "dense": 0.5},
    },
    "ast": {"interval": 10},
    "cast": {"decay": 4e-7, "interval": 10, "parts": 2},
    "slope": {"mask": "largest"},
}


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_are_those_of_the_papers(name):
    recipe = recipes.build(name, {})
    assert {key: getattr(recipe, key) for key in PAPERS[name]} == PAPERS[name]


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_shows_its_hyperparameters_alone(name):
    text = repr(recipes.build(name, {}))
    assert re.findall(r"(\w+)=", text) == list(checks(recipes.find(name)))


def test_numbers_of_numpy_and_torch_are_numbers():
    for name, key, value, expected in (
        ("sr_ste", "decay", np.float64(1e-3), 1e-3),
        ("sr_ste", "decay", np.float32(0.5), 0.5),
        ("sr_ste", "decay", torch.tensor(0.5), 0.5),
        ("ste_periodic", "interval", np.int64(5), 5),
        ("asp", "permute", np.bool_(True), True),
    ):
        given, made = recipes.build(name, {key: value}), recipes.find(name)(**{key: value})
        for recipe in (given, recipes.build(made, {})):
            assert (getattr(recipe, key), type(getattr(recipe, key))) == (expected, type(expected))
    with pytest.raises(ConfigError, match=r"sr_ste: decay=-1\.0: it takes a number at least 0"):
        recipes.build("sr_ste", {"decay": np.float64(-1)})
