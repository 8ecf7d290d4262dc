"""The recipes by name. ``find("step")`` gives the class; a dotted path such as ``mypkg.recipes.Mine`` gives a user's own.

An installed package adds names by entry points of the group ``nmrun.recipes``, such as ``mine = "mypkg.recipes:Mine"``.
"""

from __future__ import annotations

import difflib
import functools
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from nmrun.registry import imported

if TYPE_CHECKING:
    from nmrun.recipes.base import Recipe

RECIPES = {
    "dense": "nmrun.recipes.dense.Dense",
    "asp": "nmrun.recipes.asp.ASP",
    "ste": "nmrun.recipes.ste.STE",
    "sr_ste": "nmrun.recipes.sr_ste.SRSTE",
    "step": "nmrun.recipes.step.STEP",
    "s_ste": "nmrun.recipes.s_ste.SSTE",
    "bi_mask": "nmrun.recipes.bi_mask.BiMask",
    "t_sr_ste": "nmrun.recipes.t_sr_ste.TSRSTE",
    "mdgf_linear": "nmrun.recipes.mdgf.MdGfLinear",
    "mdgf_exponential": "nmrun.recipes.mdgf.MdGfExponential",
    "sdgf_stepwise": "nmrun.recipes.sdgf.SdGfStepwise",
    "sdgf_geometric": "nmrun.recipes.sdgf.SdGfGeometric",
    "decay_mask": "nmrun.recipes.decay_mask.DecayMask",
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
