"""The hyperparameters of a recipe, read from the source of its class without an import.

Recipes import torch, and the command line must not. Only their classes state a hyperparameter's
default, range and search space, such as ``decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 2e-4``. The
``nm://`` source (``nmrun.lab.words.source``) serves the config group ``recipe`` from them.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nmrun import ranges
from nmrun.lab.keys.fields import Field, plain
from nmrun.ranges import Check, Search
from nmrun.recipes import RECIPES


@functools.cache
def fields(path: str) -> Mapping[str, Field]:
    """Read the hyperparameters of a recipe class.

    Args:
        path: the path of the class, such as ``nmrun.recipes.sr_ste.SRSTE``. Only bases in the
            package of its module are read.

    Returns:
        The hyperparameters by name, those of the bases first.

    Raises:
        LookupError: where there is no such class.
    """
    module, _, name = path.rpartition(".")
    return _of_class(module, name, module.rpartition(".")[0])


def recipe_keys(name: str) -> dict[str, Check | None]:
    """Return the ranges of a built-in recipe's hyperparameters, by name.

    Args:
        name: a name of ``nmrun.recipes.RECIPES``.
    """
    return {key: field.check for key, field in fields(RECIPES[name]).items()}


def node(name: str) -> dict[str, Any]:
    """Make the config node of a built-in recipe: its name, and every hyperparameter's default.

    Args:
        name: a name of ``nmrun.recipes.RECIPES``.
    """
    return {"name": name, **{key: field.default for key, field in fields(RECIPES[name]).items()}}


def docstrings(path: str) -> tuple[str, str]:
    """Read the docstrings of a recipe class and of its module, without an import.

    Args:
        path: as of :func:`fields`.
    """
    module, _, name = path.rpartition(".")
    tree = _parsed(module)
    return ast.get_docstring(_class(tree, module, name)) or "", ast.get_docstring(tree) or ""


def _of_class(module: str, name: str, package: str) -> dict[str, Field]:
    tree = _parsed(module)
    statement = _class(tree, module, name)
    found: dict[str, Field] = {}
    for base in reversed(statement.bases):
        place = _place(tree, module, ast.unparse(base), package)
        found |= {} if place is None else _of_class(*place, package)
    for line in statement.body:
        if isinstance(line, ast.AnnAssign) and (field := _field(line)) is not None:
            key = ast.unparse(line.target)
            found[key] = replace(field, meaning=found[key].meaning if key in found else "")
    meanings = _meanings(ast.get_docstring(statement) or "")
    return {
        key: replace(field, meaning=meanings.get(key, field.meaning))
        for key, field in found.items()
    }


def _class(tree: ast.Module, module: str, name: str) -> ast.ClassDef:
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return statement
    raise LookupError(f"{module} has no class {name}")


def _meanings(docstring: str) -> dict[str, str]:
    """Read what is said of each argument below ``Args:``."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", docstring, re.M)
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in found}


@functools.cache
def _parsed(module: str) -> ast.Module:
    if os.getcwd() not in sys.path:  # as for the import of a class of the user's own
        sys.path.append(os.getcwd())
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _place(tree: ast.Module, module: str, base: str, package: str) -> tuple[str, str] | None:
    """Find the module and name of a base class; None for one outside the package."""
    first, _, rest = base.partition(".")
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == base:
            return module, base
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for alias in statement.names:
            if isinstance(statement, ast.Import):  # import package.module: the base is spelt whole
                whole, _, leaf = base.rpartition(".")
                place = (alias.name, leaf) if whole == (alias.asname or alias.name) else None
            elif first != (alias.asname or alias.name):
                place = None
            elif rest:  # from package import module
                place = (f"{_absolute(statement, package)}.{alias.name}", rest)
            else:
                place = (_absolute(statement, package), alias.name)
            if place is not None:
                return place if place[0].startswith(f"{package}.") else None
    return None


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    """Name the module of an import; the recipes' modules lie directly in the package."""
    above = package.split(".")[: len(package.split(".")) - statement.level + 1]
    parts = [*(above if statement.level else []), *([statement.module] if statement.module else [])]
    return ".".join(parts)


def _field(line: ast.AnnAssign) -> Field | None:
    """Read a hyperparameter from an annotated assignment; None where it is something else."""
    target, annotation = line.target, line.annotation
    if not isinstance(target, ast.Name) or target.id.startswith("_") or line.value is None:
        return None
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if "ClassVar" in ast.unparse(annotation).partition("[")[0]:
        return None
    try:
        default = ast.literal_eval(line.value)
    except ValueError:  # such as field(init=False)
        return None
    found = _annotated(annotation)
    return Field(
        plain(default),
        next((one for one in found if isinstance(one, Check)), None),
        next((one for one in found if isinstance(one, Search)), None),
    )


def _annotated(annotation: ast.expr) -> list[Any]:
    """Read what ``Annotated`` adds to the type: names of ``nmrun.ranges``, or calls of them."""
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return []
    if ast.unparse(annotation.value).rpartition(".")[2] != "Annotated":
        return []
    expressions = map(ast.Expression, annotation.slice.elts[1:])
    return [eval(compile(one, "<annotation>", "eval"), vars(ranges)) for one in expressions]
