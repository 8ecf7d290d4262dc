"""The recipes by name: of ``RECIPES``, of entry points ``nmrun.recipes`` of installed packages
(``mine = "mypkg.recipes:Mine"``), or by the dotted path."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nmrun import registry
from nmrun.errors import ConfigError
from nmrun.ranges import checks

if TYPE_CHECKING:
    from nmrun.recipes.base import Recipe

RECIPES = {
    "dense": "nmrun.recipes.dense.Dense",
    "asp": "nmrun.recipes.asp.ASP",
    "ste": "nmrun.recipes.ste.STE",
    "ste_periodic": "nmrun.recipes.ste.PeriodicSTE",
    "sr_ste": "nmrun.recipes.sr_ste.SRSTE",
    "step": "nmrun.recipes.step.STEP",
    "s_ste": "nmrun.recipes.s_ste.SSTE",
    "bi_mask": "nmrun.recipes.bi_mask.BiMask",
    "t_sr_ste": "nmrun.recipes.t_sr_ste.TSRSTE",
    "mdgf_linear": "nmrun.recipes.gradient_flow.MdGfLinear",
    "mdgf_exponential": "nmrun.recipes.gradient_flow.MdGfExponential",
    "sdgf_stepwise": "nmrun.recipes.gradient_flow.SdGfStepwise",
    "sdgf_geometric": "nmrun.recipes.gradient_flow.SdGfGeometric",
    "lbc": "nmrun.recipes.lbc.LBC",
    "maskllm": "nmrun.recipes.maskllm.MaskLLM",
    "slope": "nmrun.recipes.slope.SLoPe",
    "ast": "nmrun.recipes.ast.AST",
    "cast": "nmrun.recipes.cast.CAST",
    "proxsparse": "nmrun.recipes.proxsparse.ProxSparse",
    "sqft": "nmrun.recipes.sqft.SQFT",
}


def __getattr__(name: str) -> Any:
    """The classes themselves: ``from nmrun.recipes import STEP``."""
    for path in RECIPES.values():
        module, _, kind = path.rpartition(".")
        if kind == name:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'nmrun.recipes' has no attribute {name!r}")


@functools.cache
def installed() -> dict[str, str]:
    """The recipes of other installed packages, name to dotted path; a name of ``RECIPES`` is not
    theirs."""
    paths = {
        name: point.value.replace(":", ".")
        for name, point in registry.installed("nmrun.recipes").items()
    }
    return {name: path for name, path in sorted(paths.items()) if name not in RECIPES}


def find(name: str) -> type[Recipe]:
    """The class of a recipe. Raises ConfigError for an unknown name, with the nearest match, and
    for what is no recipe."""
    from nmrun.recipes.base import Recipe

    kind: type[Recipe] = registry.find("recipe", name, {**RECIPES, **installed()})
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise ConfigError(f"recipe={name} is not a subclass of nmrun.recipes.base.Recipe")
    return kind


def check_names(
    recipe: str, kind: type[Recipe], names: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Raise TypeError where a recipe's class does not take hyperparameters of these names, or asks for
    more; ``others`` as of :func:`build`."""
    given = dict.fromkeys(names)
    if unknown := registry.unknown_hyperparameters(recipe, given, checks(kind), others):
        raise TypeError(unknown[0])
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise TypeError(f"recipe={recipe}: {error}") from None


def build(
    recipe: str | Recipe, hyperparameters: Mapping[str, Any], others: Iterable[str] = ()
) -> Recipe:
    """Make a recipe of a name and its hyperparameters, or check a recipe that is made already.
    Raises ConfigError for an unknown name or a value out of its range, TypeError for an unknown
    hyperparameter. ``others``: what else may have been meant by such a one."""
    from nmrun.recipes.base import Recipe, check_hyperparameters

    if isinstance(recipe, Recipe):
        if hyperparameters:
            names = ", ".join(hyperparameters)
            raise TypeError(f"{recipe.name} is made already: give {names} to its constructor")
        instance = copy.copy(recipe)  # one object can serve several models
    elif not isinstance(recipe, str):
        raise ConfigError(
            f"recipe={recipe!r}: it takes a name, a dotted path or a recipe such as STEP()"
        )
    else:
        kind = find(recipe)
        check_names(recipe, kind, hyperparameters, others)
        instance = kind(**hyperparameters)
    check_hyperparameters(instance)
    return instance
