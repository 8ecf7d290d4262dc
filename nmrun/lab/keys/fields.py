"""The keys of a group as dataclass fields: type, range, default and meaning of a key stand in one.

::

    lr: Annotated[float, number(0, open_low=True), "learning rate, which the schedule scales"] = 1e-3

A class may give an inherited key another default, another meaning or another range; what it leaves
out is as above it: ``lr: float = 0.05``.

Recipes import torch, and a command line must not. So their fields are read from the source of the
class, without an import.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from nmrun import ranges
from nmrun.errors import ConfigError
from nmrun.ranges import Check, Search

Keys = TypeVar("Keys")


@dataclass(frozen=True)
class Field:
    """A key: its default as YAML reads it, its range, where ``nmrun tune`` looks for it, its
    meaning.

    ``default`` is None as well where the user has to give a value. Without a ``check`` it takes any
    value, without a ``search`` it is not tuned.
    """

    default: Any
    check: Check | None
    search: Search | None = None
    meaning: str = ""


@functools.cache
def fields(kind: type) -> Mapping[str, Field]:
    """The keys of a class beside ``name``: first its own, then those of each class above it."""
    above = kind.__mro__
    first = {key: place for place, base in enumerate(above) for key in _annotations(base)}
    keys = {}
    for key in sorted(dataclasses.fields(cast(Any, kind)), key=lambda key: first[key.name]):
        stated = [
            part
            for base in above
            for part in getattr(_annotations(base).get(key.name), "__metadata__", ())
        ]
        keys[key.name] = Field(
            None if key.default is dataclasses.MISSING else plain(key.default),
            next((part for part in stated if isinstance(part, Check)), None),
            next((part for part in stated if isinstance(part, Search)), None),
            next((part for part in stated if isinstance(part, str)), ""),
        )
    keys.pop("name", None)
    return keys


@functools.cache
def _annotations(base: type) -> dict[str, Any]:
    return inspect.get_annotations(base, eval_str=True)


def plain(value: Any) -> Any:
    """A default as YAML has it: a list for a tuple."""
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def defaults(keys: Mapping[str, Field]) -> dict[str, Any]:
    return {key: field.default for key, field in keys.items()}


def built(kind: type[Keys], plain: Mapping[str, Any], group: str) -> Keys:
    """The class with the values of ``plain``, whose other keys are left out.

    Raises ConfigError with each key of ``group`` that is not there.
    """
    keys = [key.name for key in dataclasses.fields(cast(Any, kind))]
    if missing := [key for key in keys if key not in plain]:
        raise ConfigError([f"{group}.{key}: missing" for key in missing])
    return kind(**{key: plain[key] for key in keys})


# --- of recipes -----------------------------------------------------------------------------------


@functools.cache
def recipe_fields(path: str) -> Mapping[str, Field]:
    """The hyperparameters of a recipe class, those of its bases first.

    ``path`` is such as ``nmrun.recipes.sr_ste.SRSTE``. Only bases in the package of its module are
    read. Raises LookupError where there is no such class.
    """
    module, _, name = path.rpartition(".")
    return _of_class(module, name, module.rpartition(".")[0])


def docstrings(path: str) -> tuple[str, str]:
    """The docstrings of a recipe class and of its module, without an import."""
    module, _, name = path.rpartition(".")
    tree = _tree(module)
    return ast.get_docstring(_class(tree, module, name)) or "", ast.get_docstring(tree) or ""


def _of_class(module: str, name: str, package: str) -> dict[str, Field]:
    tree = _tree(module)
    statement = _class(tree, module, name)
    keys: dict[str, Field] = {}
    for base in reversed(statement.bases):
        place = _place(tree, module, ast.unparse(base), package)
        keys |= {} if place is None else _of_class(*place, package)
    for line in statement.body:
        if isinstance(line, ast.AnnAssign) and (field := _field(line)) is not None:
            key = ast.unparse(line.target)
            keys[key] = replace(field, meaning=keys[key].meaning if key in keys else "")
    meanings = _meanings(ast.get_docstring(statement) or "")
    return {
        key: replace(field, meaning=meanings.get(key, field.meaning)) for key, field in keys.items()
    }


def _class(tree: ast.Module, module: str, name: str) -> ast.ClassDef:
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return statement
    raise LookupError(f"{module} has no class {name}")


def _meanings(docstring: str) -> dict[str, str]:
    """What is said of each argument below ``Args:``."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", docstring, re.M)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}


@functools.cache
def _tree(module: str) -> ast.Module:
    if os.getcwd() not in sys.path:  # as for the import of a class of the user's own
        sys.path.append(os.getcwd())
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _place(tree: ast.Module, module: str, base: str, package: str) -> tuple[str, str] | None:
    """The module and name of a base class; None for one outside the package."""
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
    # the recipes' modules lie directly in the package
    above = package.split(".")[: len(package.split(".")) - statement.level + 1]
    parts = [*(above if statement.level else []), *([statement.module] if statement.module else [])]
    return ".".join(parts)


def _field(line: ast.AnnAssign) -> Field | None:
    """A hyperparameter of an annotated assignment; None where that is something else."""
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
    parts = _metadata(annotation)
    return Field(
        plain(default),
        next((part for part in parts if isinstance(part, Check)), None),
        next((part for part in parts if isinstance(part, Search)), None),
    )


def _metadata(annotation: ast.expr) -> list[Any]:
    """What ``Annotated`` adds to the type: names of ``nmrun.ranges``, or calls of them. What is made
    of the module's own names is left out."""
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return []
    if ast.unparse(annotation.value).rpartition(".")[2] != "Annotated":
        return []
    names, parts = {**vars(ranges), "nmrun": sys.modules["nmrun"], "ranges": ranges}, []
    for expression in map(ast.Expression, annotation.slice.elts[1:]):
        with contextlib.suppress(NameError, AttributeError):
            parts.append(eval(compile(expression, "<annotation>", "eval"), names))
    return parts
