"""Dense training: the reference that every recipe is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nmrun.recipes.base import Recipe


@dataclass
class Dense(Recipe):
    """No weight is made sparse; ``nmrun.sparsify`` returns a handle that does nothing.

    When to use: as the row that every table is compared with.
    """

    name: ClassVar[str] = "dense"
