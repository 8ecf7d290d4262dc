"""Write what the pages say of the config's keys, from where the keys are defined.

``python docs/generate.py`` writes the pages of ``configs/``, one for each group, and the section on
hyperparameters of every page about recipes.
"""

from __future__ import annotations

import re
from pathlib import Path

from nmrun.lab.words import reference
from nmrun.lab.words.reference import Key, Option

DOCS = Path(__file__).parent
HEAD = """# {title}

<!-- Written by docs/generate.py from nmrun/lab/keys/, nmrun/papers/ and nmrun/recipes/. -->

"""
INDEX = """Every key with its meaning, the values that it takes and its default: what `nmrun help KEY` says.
`nmrun --cfg job` prints a whole config with its values.

| group | what it chooses |
|---|---|
"""


def pages() -> dict[Path, str]:
    """The text of every page that is written, or has a section that is."""
    written = {DOCS / "configs" / f"{group}.md": _page(group) for group in reference.GROUPS}
    written[DOCS / "configs/index.md"] = _index()
    recipes = {option.name: option for option in reference.options("recipe")}
    for path in sorted((DOCS / "recipes").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^`recipe=(\w+)`", text, re.M)
        if names and "## Hyperparameters\n" in text:
            lines = _keys([recipes[name] for name in names])
            before, _, after = text.partition("## Hyperparameters\n")
            rest = after[after.index("\n## ") :] if "\n## " in after else ""
            written[path] = f"{before}## Hyperparameters\n\n" + "\n".join(lines) + "\n" + rest
    return written


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
        lines = [f"- **`{group}={option.name}`**: {_cell(option.about)}" for option in options]
        lines += ["", "## Keys", "", *_keys(options)]
    return HEAD.format(title=group) + "\n".join(lines) + "\n"


def _keys(options: list[Option]) -> list[str]:
    """An item for each meaning of each key: a list is readable at any width, a table is not."""
    names = dict.fromkeys(key.name for option in options for key in option.keys)
    items = [
        _item(key, defaults, len(options))
        for name in names
        for key, defaults in reference.alike(name, options).items()
    ]
    return items or ["None."]


def _item(key: Key, defaults: dict[str, list[str]], count: int) -> str:
    holders = sorted(name for alike in defaults.values() for name in alike)
    shown = [
        f"`{value}`" + (f" ({', '.join(alike)})" if len(defaults) > 1 else "")
        for value, alike in defaults.items()
    ]
    of = f" ({', '.join(f'`{name}`' for name in holders)})" if len(holders) < count else ""
    facts = [f"Takes {_cell(key.takes)}" if key.takes else "", f"default {', '.join(shown)}"]
    meaning = _cell(key.meaning).rstrip(".")
    return f"- **`{key.name}`**{of}: {meaning}. {_upper('; '.join(filter(None, facts)))}."


def _cell(text: str) -> str:
    """Without the marks of reStructuredText, and with those of Markdown as they are."""
    plain = re.sub(r":\w+:(?=`)|``", lambda mark: "`" * (mark[0] == "``"), " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", plain)
    return "".join(
        p if p.startswith("`") else re.sub(r"([\\|*_])", r"\\\1", p.replace("<", "&lt;"))
        for p in parts
    )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
