"""Libraries that take seconds to import: all processes collect their tests, one runs them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Lazily:
    """A module that is imported where something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for a mock and for a wrapped fixture
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


def needs(extra: str, *libraries: str) -> pytest.MarkDecorator:
    """Skips tests where a library of nmrun's extra is not installed."""
    missing = any(find_spec(name) is None for name in libraries)
    return pytest.mark.skipif(missing, reason=f"needs nmrun[{extra}]")
