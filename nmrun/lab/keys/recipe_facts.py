"""What a command line and a table say of a recipe: its keys, its title, its docstrings.

Recipes import torch, and help must not. So what nmrun's own classes say stands in ``recipes.json``,
which ``docs/generate.py`` writes; any other class is imported.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from dataclasses import fields, replace
from importlib.resources import files
from typing import Any

from nmrun import ranges, registry
from nmrun.lab.keys.fields import Field, RecipeFacts
from nmrun.lab.keys.fields import fields as fields_of


@functools.cache
def recipe_facts(path: str) -> RecipeFacts:
    """The facts of a class by its dotted path. Raises ValueError where it cannot be imported."""
    if path not in kept():
        return of_class(registry.imported(path, path))
    facts = kept()[path]
    keys = {
        key: Field(each["default"], _made(each["check"]), _made(each["search"]), each["meaning"])
        for key, each in facts["keys"].items()
    }
    return RecipeFacts(**{**facts, "keys": keys})


@functools.cache
def kept() -> dict[str, Any]:
    """What ``recipes.json`` has, by the dotted path of a class."""
    text = (files("nmrun.lab.keys") / "recipes.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _made(call: list[Any] | None) -> Any:
    """A check or a search: a name of ``nmrun.ranges`` with its arguments."""
    if call is None:
        return None
    name, arguments, options = call
    made = getattr(ranges, name)
    return made(*arguments, **options) if callable(made) else made


def of_class(kind: Any) -> RecipeFacts:
    """The facts as the class has them."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        meanings |= _meanings(inspect.cleandoc(base.__doc__ or ""))
    keys = fields_of(kind)
    return RecipeFacts(
        vars(kind).get("title") or kind.name,  # not that of a class above it
        kind.masks_are_largest and not kind.always_transposable,
        inspect.getdoc(kind) or "",
        inspect.getdoc(inspect.getmodule(kind)) or "",
        {
            key.name: replace(keys[key.name], meaning=meanings.get(key.name, ""))
            for key in fields(kind)
            if key.name in keys
        },
    )


def _meanings(docstring: str) -> dict[str, str]:
    """What is said of each argument below ``Args:``."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", docstring, re.M)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}
