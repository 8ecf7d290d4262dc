"""RIA: relative importance and activations (Zhang et al. 2024, arXiv 2402.12419).

Wanda and magnitude can prune an input or an output entirely. A weight's share of its column and of
its row does not let that happen. Section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.oneshot.method import Scored
from nmrun.ranges import number


@dataclass
class RIA(Scored):
    """Score ``(|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) * ||X_j||_2^a``.

    Args:
        a: how much the activations count; 0.5 in the paper.
    """

    name: ClassVar[str] = "ria"

    a: Annotated[float, number(0)] = 0.5

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        size = weight.abs()
        least = torch.finfo(size.dtype).tiny  # a column or row of zeros has the score 0
        of_column = size / size.sum(0, keepdim=True).clamp_min(least)
        of_row = size / size.sum(1, keepdim=True).clamp_min(least)
        return (of_column + of_row) * norms**self.a
