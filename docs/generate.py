"""Write what the pages say of the config's keys and of the committed runs, from where these are.

``python docs/generate.py`` writes the pages of ``configs/``, one for each group, when to use it on
every page about recipes, and what the pages say of committed runs (``measured.py``).

``python docs/generate.py pictures`` draws the pictures of these pages as well, by the commands in
``<!-- picture: COMMAND -->``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from measured import PICTURE, result, results, upper

from nmrun import ranges
from nmrun.lab.config import reference
from nmrun.lab.config.reference import Key, Option
from nmrun.lab.keys.options import kept, of_class
from nmrun.recipes import RECIPES
from nmrun.registry import imported

DOCS = Path(__file__).parent
RECIPE_OF_PAGE = re.compile(r"^`recipe=(\w+)`", re.M)
HEAD = """# {title}

<!-- Written by docs/generate.py from nmrun/lab/keys/, nmrun/papers/ and nmrun/recipes/. -->

"""
INDEX = """Every key with its meaning, the values that it takes and its default: what `nmrun help KEY` says.
`nmrun --cfg job` prints a whole config with its values.

| group | what it chooses |
|---|---|
"""
TABLE = DOCS.parent / "nmrun/lab/keys/recipes.json"
kept().clear()  # the pages are made of the classes themselves
RECIPE = """What each recipe does, in a line, and its keys. `nmrun help recipe=NAME` says more of one.
[Which recipe?](../which-recipe.md) helps to choose."""
OTHER = """What each of them is, and its keys: what `nmrun help {group}=NAME` prints. Those with the same keys
share a section."""


def pages() -> dict[Path, str]:
    """The text of every page that is written, or has a section that is."""
    written = {DOCS / "configs" / f"{group}.md": _page(group) for group in reference.GROUPS}
    written[DOCS / "configs/index.md"] = _index()
    recipes = {option.name: option for option in reference.options("recipe")}
    for path, names in _pages_of_recipes().items():
        head, _, rest = path.read_text(encoding="utf-8").partition("## When to use\n\n")
        _, _, below = rest.partition("\n\n")
        use = _uses([recipes[name] for name in names])
        written[path] = f"{head}## When to use\n\n{use}\n\n{below}"
    written[TABLE] = _recipe_table()
    path = DOCS / "which-recipe.md"
    written[path] = result(path)
    return written


def _recipe_table() -> str:
    """What the classes of recipes say, for commands that must not import torch."""
    table = {}
    for path in RECIPES.values():
        kind = imported(path, path)
        facts = of_class(kind)
        table[path] = vars(facts) | {
            "keys": {
                key: {
                    "default": field.default,
                    "check": _call(kind, key, ranges.Check),
                    "search": _call(kind, key, ranges.Search),
                    "meaning": field.meaning,
                }
                for key, field in facts.keys.items()
            }
        }
    return json.dumps(table, indent=1) + "\n"


def _call(kind: type, key: str, made: type) -> list[Any] | None:
    """What makes the check or the search of a key: a name of ``nmrun.ranges`` with its arguments."""
    for base in kind.__mro__:
        annotation = ast.parse(inspect.get_annotations(base).get(key, "None"), mode="eval")
        for part in ast.walk(annotation):
            code = ast.unparse(part) if isinstance(part, ast.Call | ast.Name) else ""
            name = code.partition("(")[0]
            if name in vars(ranges) and isinstance(eval(code, vars(ranges)), made):
                if isinstance(part, ast.Name):
                    return [name, [], {}]
                options = {each.arg: ast.literal_eval(each.value) for each in part.keywords}
                return [name, [ast.literal_eval(each) for each in part.args], options]
    return None


def _uses(options: list[Option]) -> str:
    """When to use the recipes of a page: the first paragraph of that section."""
    uses = {option.name: _cell(option.use.removeprefix("When to use: ")) for option in options}
    if len(uses) == 1:
        return upper(*uses.values())
    return "\n".join(f"- `{name}`: {use}" for name, use in uses.items())


def _index() -> str:
    """The page of all groups, with the keys that are in none."""
    lines = [f"| [`{group}`]({group}.md) | {_chosen(group)} |" for group in reference.GROUPS]
    own = ["", "## In no group", "", *_keys(reference.options(""))]
    return HEAD.format(title="Config keys") + INDEX + "\n".join([*lines, *own]) + "\n"


def _chosen(group: str) -> str:
    options = reference.options(group)
    if not options[0].name:
        return _cell(options[0].about)
    return ", ".join(f"`{option.name}`" for option in options)


def _page(group: str) -> str:
    options = reference.options(group)
    if not options[0].name:
        lines = [_cell(options[0].about), "", *_keys(options)]
    else:
        lines = [RECIPE if group == "recipe" else OTHER.format(group=group)]
        lines += [line for some in _alike(options) for line in _section(some)]
    return HEAD.format(title=group) + "\n".join(lines) + "\n"


def _alike(options: list[Option]) -> list[list[Option]]:
    """The options by section: those whose keys mean the same share one. Each recipe has its own."""
    found: dict[object, list[Option]] = {}
    for option in options:
        keys = tuple((key.name, key.meaning, key.takes) for key in option.keys)
        found.setdefault(option.name if option.group == "recipe" else keys, []).append(option)
    return [*found.values()]


def _section(options: list[Option]) -> list[str]:
    """What options are, and their keys."""
    lines = ["", f"## {', '.join(option.name for option in options)}"]
    for option in options:
        of = f"`{option.name}`: " if len(options) > 1 else ""
        lines += ["", of + _cell(option.about) + _more(option)]
    keys = _keys(options)
    return [*lines, *([""] if keys else []), *keys]


def _more(option: Option) -> str:
    """A link to the page of a recipe."""
    pages = _pages_of_recipes() if option.group == "recipe" else {}
    found = [page.name for page, names in pages.items() if option.name in names]
    return f" [More](../recipes/{found[0]})." if found else ""


@cache
def _pages_of_recipes() -> dict[Path, list[str]]:
    """The recipes that each page is of."""
    return {
        path: names
        for path in sorted((DOCS / "recipes").glob("*.md"))
        if (names := RECIPE_OF_PAGE.findall(path.read_text(encoding="utf-8")))
    }


def _keys(options: list[Option]) -> list[str]:
    """An item for each key: a list is readable at any width, a table is not."""
    return [
        _item(key, defaults)
        for name in dict.fromkeys(key.name for key in options[0].keys)
        for key, defaults in reference.key_meanings(name, options).items()
    ]


def _item(key: Key, defaults: dict[str, list[str]]) -> str:
    shown = [
        f"`{value}`" + (f" ({', '.join(alike)})" if len(defaults) > 1 else "")
        for value, alike in defaults.items()
    ]
    facts = [f"Takes {_cell(key.takes)}" if key.takes else "", f"default {', '.join(shown)}"]
    meaning = _cell(key.meaning).rstrip(".")
    return f"- **`{key.name}`**: {meaning}. {upper('; '.join(filter(None, facts)))}."


def _cell(text: str) -> str:
    """Without the marks of reStructuredText, and with those of Markdown as they are."""
    plain = " ".join(text.split()).replace("``", "`")
    plain = re.sub(r":\w+:(?=`)", "", plain)
    parts = re.split(r"(`[^`]*`)", plain)
    return "".join(
        p if p.startswith("`") else re.sub(r"([\\|*_])", r"\\\1", p.replace("<", "&lt;"))
        for p in parts
    )


def draw() -> None:
    """Draw the pictures of the pages of results, and the one of which recipe to take."""
    for path in results():
        for command in PICTURE.findall(path.read_text(encoding="utf-8")):
            program, *words = shlex.split(command)
            subprocess.run([sys.executable, "-m", program, *words], cwd=DOCS.parent, check=True)
    for script in ("which_recipe.py", "retraining.py"):
        subprocess.run([sys.executable, DOCS / "pictures" / script], check=True)


if __name__ == "__main__":
    if "pictures" in sys.argv[1:]:
        draw()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for path in results():
        path.write_text(result(path), encoding="utf-8")
