"""N:M patterns: what is one, how it is written, and what the user reads when it is none."""

import subprocess
import sys

import pytest

from nmrun import Pattern
from nmrun.patterns import PatternError


@pytest.mark.parametrize(
    ("text", "n", "m"),
    [("2:4", 2, 4), ("2of4", 2, 4), (" 1:16 ", 1, 16), ("3:16", 3, 16), ("4:4", 4, 4)],
)
def test_parse(text, n, m):
    pattern = Pattern.parse(text)
    assert (pattern.n, pattern.m) == (n, m)
    assert Pattern.parse(pattern) is pattern
    assert Pattern.parse(str(pattern)) == Pattern.parse(pattern.slug) == pattern


@pytest.mark.parametrize(
    "text",
    ["5:4", "0:4", "28", "2:4:8:2", "", ":", "2:", "-2:4", "2.0:4", "2;4", "a:b", "124", "0:0"],
)
def test_what_is_no_pattern_is_named_with_what_would_be(text):
    with pytest.raises(PatternError, match=r"is not an N:M pattern.*2:4") as raised:
        Pattern.parse(text)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_blocks_of_rows():
    """V:N:M, whose rows are N:M."""
    pattern = Pattern.parse("64:2:8")
    assert (pattern.v, pattern.n, pattern.m, pattern.density) == (64, 2, 8, 0.25)
    assert Pattern.parse("64of2of8") == pattern
    assert (str(pattern), pattern.slug) == ("64:2:8", "64of2of8")
    assert pattern.by_rows == Pattern(2, 8)
    assert Pattern.parse("1:2:8") == Pattern(2, 8)
    for text in ("64:5:8", "64:2:4", "0:2:8", "64:0:8"):
        with pytest.raises(PatternError, match=r"is not a V:N:M pattern.*64:2:8") as raised:
            Pattern.parse(text)
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)


def test_forms_for_people_and_paths():
    pattern = Pattern(2, 8)
    assert (str(pattern), pattern.slug, pattern.density) == ("2:8", "2of8", 0.25)
    assert not set(pattern.slug) & set(": /\\")


def test_reading_patterns_needs_no_torch():
    code = "import sys, nmrun.patterns, nmrun.errors; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
