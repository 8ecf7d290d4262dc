"""Wanda: weights times activations (Sun et al. 2023, arXiv 2306.11695).

A small weight may carry a large input. Section 3, equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nmrun.oneshot.method import Scored


@dataclass
class Wanda(Scored):
    """Score ``|W_ij| * ||X_j||_2``."""

    name: ClassVar[str] = "wanda"

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        return weight.abs() * norms
