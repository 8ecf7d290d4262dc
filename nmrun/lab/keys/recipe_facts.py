"""What a command line and a table say of a recipe: its keys, its title, its docstrings.

Recipes import torch, and help must not. So what nmrun's own classes say stands in
``recipe_table.py``, which ``docs/generate.py`` writes; any other class is imported.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import fields, replace
from typing import Any

from nmrun import registry
from nmrun.lab.keys.fields import RecipeFacts
from nmrun.lab.keys.fields import fields as fields_of
from nmrun.lab.keys.recipe_table import TABLE


@functools.cache
def recipe_facts(path: str) -> RecipeFacts:
    """The facts of a class by its dotted path. Raises ValueError where it cannot be imported."""
    return TABLE[path] if path in TABLE else of_class(registry.imported(path, path))


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
