"""How long the sentences of the README and of the pages of results are.

python tests/sentences.py [PAGE ...]     # mean and longest of each page, and its longest sentence
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/results").glob("*.md")),
    ROOT / "docs/which-recipe.md",
]
NO_PROSE = re.compile(r"```.*?```|<!--.*?-->|^(?:\||#|!\[|\[!)[^\n]*", re.S | re.M)


def sentences(path: Path) -> list[str]:
    """Without code, tables, headings and pictures; an item of a list begins a new one."""
    text = NO_PROSE.sub("\n\n", path.read_text(encoding="utf-8"))
    text = re.sub(r"\]\([^)]*\)|[\[*]", "", text)
    parts = re.split(r"\n\s*\n|\n *(?:-|\d+\.) ", text)
    ends = (end for part in parts for end in re.split(r"(?<=[.!?:])\s+(?=[A-Z`])", part))
    return [" ".join(each.split()) for each in ends if len(each.split()) > 2]


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]) if sys.argv[1:] else PAGES:
        lengths = {each: len(each.split()) for each in sentences(page)}
        longest = max(lengths, key=lengths.__getitem__)
        mean = sum(lengths.values()) / len(lengths)
        print(f"{page.name:25} mean {mean:4.1f}  longest {lengths[longest]:3}  {longest}")
