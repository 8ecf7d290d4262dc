"""The recipes by name. ``find("step")`` gives the class; a dotted path such as ``mypkg.recipes.Mine`` gives a user's own."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nmrun.recipes.base import Recipe

RECIPES = {
    "dense": "nmrun.recipes.dense.Dense",
    "asp": "nmrun.recipes.asp.ASP",
    "ste": "nmrun.recipes.ste.STE",
    "sr_ste": "nmrun.recipes.sr_ste.SRSTE",
    "step": "nmrun.recipes.step.STEP",
    "s_ste": "nmrun.recipes.s_ste.SSTE",
}


def find(name: str) -> type[Recipe]:
    """The recipe class for a name of ``RECIPES`` or a dotted path. Raises ValueError with the nearest match."""
    from nmrun.recipes.base import Recipe

    path = RECIPES.get(name, name)
    if "." not in path:
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no recipe {name!r}; {hint}There are {', '.join(sorted(RECIPES))}")
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"recipe {name!r} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        raise ValueError(f"recipe {name!r} is not a subclass of nmrun.recipes.base.Recipe")
    return found
