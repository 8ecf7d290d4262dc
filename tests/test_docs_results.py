"""The tables of docs/results/ are what the commands on their pages print from the committed runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from verbs import verb

ROOT = Path(__file__).parent.parent
PAGES = ("language", "images", "switch", "retraining")


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_what_the_page_s_commands_print(page, capsys):
    text = (ROOT / "docs/results" / f"{page}.md").read_text()
    commands = re.findall(r"^nmrun table docs/[^#\n]*", text, re.M)
    assert commands
    printed: list[str] = []
    for command in commands:
        _, _, path, *words = shlex.split(command)
        assert verb("table", str(ROOT / path), *words) == 0
        printed += [line for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    shown = [line for line in text.splitlines() if re.match(r"\|.*(\+-|p[=<\\])", line)]
    assert len(shown) > 10
    assert set(shown) <= set(printed)
