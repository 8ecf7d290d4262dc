"""Dense training: the reference that every recipe is compared with."""

from __future__ import annotations

from typing import ClassVar

from nmrun.recipes.base import Recipe


class Dense(Recipe):
    """No weight is made sparse and nothing is attached; ``nmrun.sparsify`` returns a handle that does nothing."""

    name: ClassVar[str] = "dense"
    by_rows = True
