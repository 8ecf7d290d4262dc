"""Magnitude: keep the largest ``|w|``. What every method is compared with; looks at no inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nmrun.oneshot.method import Scored


@dataclass
class Magnitude(Scored):
    """Score ``|W_ij|``."""

    name: ClassVar[str] = "magnitude"

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        return weight.abs()
