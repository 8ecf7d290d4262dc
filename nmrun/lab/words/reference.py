"""What every key of a config means, which values it takes and what it is by default.

A meaning stands once, beside the default: in the comments of ``conf/``, and of a recipe in the
docstring of its class. Ranges are those of ``nmrun.lab.keys``. ``nmrun help`` and the page of keys
in the documentation are made from here. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from nmrun.lab.keys import installed
from nmrun.lab.keys.groups import Run
from nmrun.lab.words import recipe_fields, schema, yaml_files
from nmrun.ranges import Check, Search, checks, shown
from nmrun.recipes import RECIPES

GROUPS = (
    "dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "trainer", "track",
)  # fmt: skip
LINE = re.compile(r"(\w+): *(.*?)(?: +# (.*))?$")


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
    conf = files("nmrun.conf")
    if group in ("", *schema.UNNAMED):
        place = {"": "nmrun", "sparsity": "sparsity/dense"}.get(group, f"{group}/default")
        ranges = checks(schema.UNNAMED[group] if group else Run)
        return [_written(group, "", conf / f"{place}.yaml", ranges)]
    if group == "recipe":
        found = [_recipe(name, path) for name, path in RECIPES.items()]
    else:
        kinds = schema.KINDS[group]
        found = [
            _written(group, name, _preset(group, name), checks(kinds[name]))
            for name in sorted(kinds)
        ]
    return found + [_own(group, file) for file in yaml_files.of_folder(config_dir).get(group, ())]


def _preset(group: str, name: str) -> Traversable:
    own = files("nmrun.conf") / group / f"{name}.yaml"
    return own if own.is_file() else installed.preset(group, name)


def _own(group: str, file: Path) -> Option:
    """An option of the user's own: of a class its keys are no business of ours."""
    content = yaml_files.read(file, str(file))
    given = content if isinstance(content, dict) else {}
    known = schema.ranges(group, given)
    return _written(group, file.stem, file, {str(key): known.get(key) for key in given})


def _written(
    group: str, name: str, file: Path | Traversable, ranges: Mapping[str, Check | None]
) -> Option:
    """An option as its file has it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    above: list[str] = []
    about, keys = "", []
    for number, line in enumerate(lines):
        if line.startswith("#"):
            above.append(line.removeprefix("#").strip())
            continue
        if number == len(above):
            about, above = " ".join(above), []  # the first lines are about the whole file
        found = LINE.match(line)
        if found and found[1] in ranges and found[1] not in ("name", "_target_"):
            dotted = f"{group}.{found[1]}".lstrip(".")
            meaning = found[3] or " ".join(above)
            keys.append(Key(dotted, meaning, _takes(ranges[found[1]]), found[2]))
        above = []
    return Option(group, name, about, tuple(keys))


def _recipe(name: str, path: str) -> Option:
    keys = (
        Key(f"recipe.{key}", field.meaning, _takes(field.check, field.search), shown(field.default))
        for key, field in recipe_fields.fields(path).items()
    )
    of_class, of_module = recipe_fields.docstrings(path)
    return Option("recipe", name, of_class.partition("\n\n")[0], tuple(keys), of_module)


def _takes(check: Check | None, search: Search | None = None) -> str:
    parts = ["" if check is None else check.allowed, f"nmrun tune tries {search}" if search else ""]
    return "; ".join(filter(None, parts))


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
