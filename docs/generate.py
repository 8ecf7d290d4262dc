"""Write what the pages say of the config's keys, from where the keys are defined.

``python docs/generate.py`` writes ``configs.md`` and the section on hyperparameters of every page
about recipes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nmrun.lab.words import reference
from nmrun.lab.words.reference import Key, Option

DOCS = Path(__file__).parent
HEAD = """# Config keys

Every key with its meaning, the values that it takes and its default: what `nmrun help KEY` says.
`nmrun --cfg job` prints a whole config with its values.

<!-- Written by docs/generate.py from conf/, nmrun/lab/keys/ and nmrun/recipes/. -->

"""


def pages() -> dict[Path, str]:
    """The text of every page that is written, or has a section that is."""
    written = {DOCS / "configs.md": HEAD + "\n".join(_sections()).rstrip() + "\n"}
    recipes = {option.name: option for option in reference.options("recipe")}
    for path in sorted((DOCS / "recipes").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^`recipe=(\w+)`", text, re.M)
        if names and "## Hyperparameters\n" in text:
            lines = _table([recipes[name] for name in names])
            before, _, after = text.partition("## Hyperparameters\n")
            rest = after[after.index("\n## ") :] if "\n## " in after else ""
            written[path] = f"{before}## Hyperparameters\n\n" + "\n".join(lines) + "\n" + rest
    return written


def _sections() -> Iterator[str]:
    yield from ("## In no group", "", *_table(reference.options("")), "")
    for group in reference.GROUPS:
        options = reference.options(group)
        if not options[0].name:
            yield from (f"## {group}", "", _sentence(options[0].about), "", *_table(options), "")
            continue
        yield from (f"## {group}", "", f"| `{group}=` | |", "|---|---|")
        yield from (f"| `{option.name}` | {_cell(option.about)} |" for option in options)
        yield ""
        yield from (*_table(options), "")


def _table(options: list[Option]) -> list[str]:
    """A row for each meaning of each key."""
    named = len(options) > 1
    lines = [
        "| key | of | meaning | takes | default |"
        if named
        else "| key | meaning | takes | default |",
        "|---|---|---|---|---|" if named else "|---|---|---|---|",
    ]
    names = dict.fromkeys(key.name for option in options for key in option.keys)
    for name in names:
        for key, defaults in reference.alike(name, options).items():
            lines.append(_row(key, defaults, len(options), named))
    return lines if names else ["None."]


def _row(key: Key, defaults: dict[str, list[str]], count: int, named: bool) -> str:
    holders = [name for alike in defaults.values() for name in alike]
    of = "all" if len(holders) == count else ", ".join(f"`{name}`" for name in sorted(holders))
    few = len(defaults) == 1
    shown = [
        _code(value) if few else f"{_code(value)} ({', '.join(alike)})"
        for value, alike in defaults.items()
    ]
    cells = [f"`{key.name}`", *([of] if named else []), _cell(key.meaning), _cell(key.takes)]
    return "| " + " | ".join([*cells, "; ".join(shown)]) + " |"


def _code(value: str) -> str:
    """A pipe in code ends the cell for GitHub, and stays escaped for Python-Markdown."""
    return f"`{value}`" if "|" not in value else f"<code>{value.replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    """Without the marks of reStructuredText, and with those of Markdown as they are."""
    plain = re.sub(r":\w+:(?=`)|``", lambda mark: "`" * (mark[0] == "``"), " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", plain)
    return "".join(
        p if p.startswith("`") else re.sub(r"([\\|*_])", r"\\\1", p.replace("<", "&lt;"))
        for p in parts
    )


def _sentence(text: str) -> str:
    text = _cell(text)
    return text[:1].upper() + text[1:] + "."


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
