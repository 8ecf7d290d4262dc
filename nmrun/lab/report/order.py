"""In which order rows and columns stand: recipes as the package lists them, ratios from dense to
sparse, numbers by size, other texts by the alphabet.
"""

from __future__ import annotations

from nmrun.patterns import Pattern, PatternError
from nmrun.recipes import RECIPES

RECIPE_ORDER = tuple(RECIPES)


def of(text: str) -> tuple[int, float, int, str]:
    """The place of a label: recipes first, then ratios, numbers, and other texts."""
    if text in RECIPE_ORDER:
        return (0, RECIPE_ORDER.index(text), 0, "")
    try:
        pattern = Pattern.parse(text)
        # densest first; 2:4 before 4:8, and 2:8 before 64:2:8
        return (1, -pattern.density, pattern.m, f"{pattern.v:06}")
    except PatternError:
        pass
    try:
        return (2, float(text), 0, "")
    except ValueError:
        return (3, 0.0, 0, text)
