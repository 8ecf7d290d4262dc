"""Errors as users meet them: one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def one_line(kind: type[Exception] | tuple[type[Exception], ...], match: str) -> Iterator[None]:
    """What is raised below is of this kind, its message matches, and is one line."""
    with pytest.raises(kind, match=match) as raised:
        yield
    assert "\n" not in str(raised.value)
