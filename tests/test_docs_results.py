"""The tables of docs/results/ are what the commands on their pages print from the committed runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from verbs import verb

ROOT = Path(__file__).parent.parent
PAGES = (
    "claims",
    "language",
    "images",
    "translation",
    "finetuning",
    "switch",
    "retraining",
    "digits",
)


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_what_the_page_s_commands_print(page, capsys):
    text = (ROOT / "docs/results" / f"{page}.md").read_text()
    commands = re.findall(r"^nmrun table docs/[^#\n]*", text, re.M)
    assert commands
    printed: list[str] = []
    for command in commands:
        words = [
            str(ROOT / word) if word.endswith(".csv") else word for word in shlex.split(command)
        ]
        assert verb(*words[1:]) == 0
        printed += [line for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    shown = [line for line in text.splitlines() if re.match(r"\|.*(\+-|p[=<\\])", line)]
    assert len(shown) > 10
    assert set(shown) <= set(printed)


def test_the_recipes_pages_quote_the_table_of_the_digits(capsys):
    """Each row stands on a page, beside that of dense training."""
    computed = dict(rows(*table_of_digits(capsys)))
    assert len(computed) == 15
    quoted: set[str] = set()
    for page in sorted((ROOT / "docs/recipes").glob("*.md")):
        shown = dict(rows(*page.read_text().splitlines()))
        assert shown == {name: computed.get(name) for name in shown}, page.name
        assert not shown or "dense" in shown, page.name
        quoted |= set(shown)
    assert quoted == set(computed)


def test_no_recipe_is_shown_to_differ_from_sr_ste_on_the_digits(capsys):
    """The page says so, with the number of comparisons and the one that comes nearest."""
    lines = table_of_digits(capsys, "--baseline", "sr_ste")
    tested = re.findall(r"(\S+ \[\S+ \S+\]) p=([\d.]+)", "\n".join(lines))
    difference, p = min(tested, key=lambda found: float(found[1]))
    assert float(p) > 0.05
    text = " ".join((ROOT / "docs/results/digits.md").read_text().split())
    assert f"Of {len(tested)} differences to SR-STE none is significant" in text
    assert f"({difference}, p={p})" in text


def table_of_digits(capsys, *words: str) -> list[str]:
    assert verb("table", str(ROOT / "docs/results/digits.csv"), *words) == 0
    return capsys.readouterr().out.splitlines()


def rows(*lines: str) -> list[tuple[str, list[str]]]:
    """A table's recipes with their means, without bold print and numbers of runs."""
    plain = [re.sub(r" \(\d+\)|\*\*|`", "", line) for line in lines if re.match(r"\|.*\+-", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in plain]
    return [(name, values) for name, *values in cells]
