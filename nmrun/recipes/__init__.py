"""The recipes by name. ``find("step")`` gives the class; a dotted path such as ``mypkg.recipes.Mine`` gives a user's own.

An installed package adds names by entry points of the group ``nmrun.recipes``, such as ``mine = "mypkg.recipes:Mine"``.
"""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from nmrun.registry import imported

if TYPE_CHECKING:
    from nmrun.recipes.base import Recipe

RECIPES = {
    "dense": "nmrun.recipes.dense.Dense",
    "asp": "nmrun.recipes.asp.ASP",
    "ste": "nmrun.recipes.ste.STE",
    "ste_periodic": "nmrun.recipes.periodic.PeriodicSTE",
    "sr_ste": "nmrun.recipes.sr_ste.SRSTE",
    "step": "nmrun.recipes.step.STEP",
    "s_ste": "nmrun.recipes.s_ste.SSTE",
    "bi_mask": "nmrun.recipes.bi_mask.BiMask",
    "t_sr_ste": "nmrun.recipes.t_sr_ste.TSRSTE",
    "mdgf_linear": "nmrun.recipes.mdgf.MdGfLinear",
    "mdgf_exponential": "nmrun.recipes.mdgf.MdGfExponential",
    "sdgf_stepwise": "nmrun.recipes.sdgf.SdGfStepwise",
    "sdgf_geometric": "nmrun.recipes.sdgf.SdGfGeometric",
    "decay_mask": "nmrun.recipes.mdgf.DecayMask",
    "decay_structure": "nmrun.recipes.sdgf.DecayStructure",
    "lbc": "nmrun.recipes.lbc.LBC",
    "maskllm": "nmrun.recipes.maskllm.MaskLLM",
}


@functools.cache
def installed() -> dict[str, str]:
    """The recipes of other installed packages: name to dotted path. A name of ``RECIPES`` is not theirs to take."""
    found = {point.name: point.value.replace(":", ".") for point in entry_points(group="nmrun.recipes")}
    return {name: path for name, path in sorted(found.items()) if name not in RECIPES}


def find(name: str) -> type[Recipe]:
    """The recipe class for a name of ``RECIPES`` or :func:`installed`, or a dotted path, also of a module in the current folder.

    Raises ValueError, for an unknown name with the nearest match.
    """
    from nmrun.recipes.base import Recipe

    known = {**RECIPES, **installed()}
    path = known.get(name, name)
    if "." not in path:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no recipe {name!r}; {hint}There are {', '.join(sorted(known))}")
    found: type[Recipe] = imported(path, f"recipe {name!r}")
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        raise ValueError(f"recipe {name!r} is not a subclass of nmrun.recipes.base.Recipe")
    return found


def build(recipe: str | Recipe, hyperparameters: Mapping[str, Any]) -> Recipe:
    """A recipe by its name with these hyperparameters, checked; a recipe as it is.

    Raises:
        ConfigError: for an unknown name, or a value out of its range.
        TypeError: for an unknown hyperparameter.
    """
    from nmrun.recipes.base import Recipe, check_hyperparameters
    from nmrun.recipes.base import hyperparameters as known_of

    if isinstance(recipe, Recipe):
        if hyperparameters:
            given = ", ".join(hyperparameters)
            raise TypeError(f"{recipe.name} is made already: give {given} to its constructor")
        made = copy.copy(recipe)  # one object can serve several models
        made.events = []
    else:
        kind = find(recipe)
        known = list(known_of(kind))
        for key in hyperparameters:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]}? " if near else ""
                has = ", ".join(known) or "none"
                raise TypeError(f"{recipe} has no hyperparameter {key!r}; {hint}It has {has}")
        made = kind(**hyperparameters)
    check_hyperparameters(made)
    return made
