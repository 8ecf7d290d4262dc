"""What every key of a config means, which values it takes and what it is by default.

All of it stands in the classes of ``nmrun.lab.keys``, and of recipes in theirs. ``nmrun help`` and
the page of keys in the documentation are made from here. No torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmrun.lab.keys import options as kinds
from nmrun.lab.keys.fields import Field, fields
from nmrun.lab.keys.groups import Run
from nmrun.lab.words import recipe_fields, yaml_files
from nmrun.ranges import shown
from nmrun.recipes import RECIPES

GROUPS = kinds.GROUPS


@dataclass(frozen=True)
class Key:
    """A key of one option: the same key can be another thing in another option.

    Attributes:
        name: with its group, such as ``recipe.decay``.
        meaning: in words.
        takes: the values that are allowed, in words; empty where any is.
        default: as a command line has it.
    """

    name: str
    meaning: str
    takes: str
    default: str


@dataclass(frozen=True)
class Option:
    """A kind of a group, such as ``recipe=sr_ste``; of ``trainer`` and the keys in no group there
    is one, without a name.

    Attributes:
        group: the group; empty for the keys in none.
        name: its name.
        about: what it is, in a line.
        keys: its keys.
        more: of a recipe: its paper, what it does, when to use it and what it costs.
    """

    group: str
    name: str
    about: str
    keys: tuple[Key, ...]
    more: str = ""


def options(group: str, config_dir: str | None = None) -> list[Option]:
    """The options of a group, first those that come with nmrun, recipes in their papers' order.

    Args:
        group: one of ``GROUPS``, or empty for the keys that are in no group.
        config_dir: a folder of more configs.

    Raises:
        ConfigError: for a config of one's own that cannot be read.
    """
    if group in ("", *kinds.UNNAMED):
        return [_of_class(group, "", kinds.kind(group) if group else Run)]
    if group == "recipe":
        found = [_recipe(name, path) for name, path in RECIPES.items()]
    else:
        found = [
            _of_class(group, name, kinds.kind(group, name)) for name in sorted(kinds.names(group))
        ]
    return found + [_own(group, file) for file in yaml_files.of_folder(config_dir).get(group, ())]


def _of_class(group: str, name: str, kind: type) -> Option:
    about = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    return Option(group, name, " ".join(about.split()), _keys(group, fields(kind)))


def _recipe(name: str, path: str) -> Option:
    of_class, of_module = recipe_fields.docstrings(path)
    about = of_class.partition("\n\n")[0]
    return Option("recipe", name, about, _keys("recipe", recipe_fields.fields(path)), of_module)


def _own(group: str, file: Path) -> Option:
    """A user's own preset: its keys mean what those of the class mean that it names."""
    content = yaml_files.read(file, str(file))
    given = content if isinstance(content, dict) else {}
    known = _known(group, given)
    own = {
        str(key): Field(value, *(known[key].check, known[key].search, known[key].meaning))
        if key in known
        else Field(value, None)
        for key, value in given.items()
        if key not in ("name", "_target_", "defaults")
    }
    return Option(group, file.stem, str(file), _keys(group, own))


def _known(group: str, given: Mapping[str, Any]) -> Mapping[str, Field]:
    target, above = given.get("_target_"), given.get("defaults")
    first = above[0] if isinstance(above, list) and above else given.get("name")
    name = str(given.get("name", first))
    try:
        if group == "recipe":
            return recipe_fields.fields(str(target) if target else RECIPES[name])
        return {} if target or group not in GROUPS else fields(kinds.kind(group, name))
    except (LookupError, ImportError, SyntaxError, OSError):  # what is wrong with it a run will say
        return {}


def _keys(group: str, own: Mapping[str, Field]) -> tuple[Key, ...]:
    return tuple(
        Key(f"{group}.{key}".lstrip("."), field.meaning, _takes(field), _typed(field.default))
        for key, field in own.items()
    )


def _takes(field: Field) -> str:
    tuned = f"nmrun tune tries {field.search}" if field.search else ""
    return "; ".join(filter(None, ["" if field.check is None else field.check.allowed, tuned]))


def _typed(value: Any) -> str:
    """A value as a command line has it: a text in a list in quotes where it is no plain word."""
    if not isinstance(value, list):
        return shown(value)
    plain = (str(item) if re.fullmatch(r"[\w.-]+", str(item)) else f"'{item}'" for item in value)
    return f"[{', '.join(plain)}]"


def alike(name: str, among: list[Option]) -> dict[Key, dict[str, list[str]]]:
    """The meanings of a key in a group, each with its defaults and the options that have these.

    Args:
        name: with its group, such as ``recipe.decay``.
        among: the group's options.
    """
    found: dict[tuple[str, str], tuple[Key, dict[str, list[str]]]] = {}
    for option in among:
        for key in option.keys:
            if key.name == name:
                _, defaults = found.setdefault((key.meaning, key.takes), (key, {}))
                defaults.setdefault(key.default, []).append(option.name)
    return dict(found.values())
