"""Errors of others that become mistakes of the user's, with all their lines."""

from __future__ import annotations

import pytest

from nmrun.errors import ConfigError, needs, raise_all, refused


def test_an_error_becomes_a_line_with_what_it_is_of():
    with pytest.raises(ConfigError) as raised, refused("a.txt: ", OSError, ValueError):
        raise ValueError("no number\nand a stack")
    assert raised.value.problems == ["a.txt: no number"]


def test_every_line_of_a_mistake_begins_so():
    with pytest.raises(ConfigError) as raised, refused("--over ", ConfigError):
        raise_all(["lr: low", "decay: high"])
    assert raised.value.problems == ["--over lr: low", "--over decay: high"]


def test_other_errors_stay_what_they_are():
    with pytest.raises(KeyError), refused("a.txt: ", OSError):
        raise KeyError("other")


def test_a_missing_package_names_its_extra():
    with (
        pytest.raises(ConfigError, match=r"model=timm needs not_there: .*\[timm\]"),
        needs("model=timm", "timm"),
    ):
        import not_there  # type: ignore[import-not-found]  # noqa: F401
