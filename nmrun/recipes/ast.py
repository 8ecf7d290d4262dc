"""AST, the Adaptive Sparse Trainer: retraining with a decay of the pruned weights that grows (Huang et
al. 2024, arXiv 2407.20584, AAAI 2025).

The forward pass uses ``m * w`` with straight-through gradients; the mask is chosen anew every
``interval`` steps. Pruned weights decay as in SR-STE, by a factor that rises linearly from 0 to
``decay``. AdamW is changed so that the decay has no momentum, as in the authors' code
(thu-ml/Adaptive-Sparse-Trainer, ``adamw.py``): with Adam's first moment m1, l the factor now and the
step of :mod:`nmrun.recipes.adam_decay`::

    u = m1 + l * (1 - m) * w

The paper's teacher, the dense network, is ``trainer.distill``. Not here: its masks by Wanda's scores,
and its low-rank weights beside the sparse ones (SLoRB), new parameters of the network. When to use:
retraining a trained network. Cost: a mask byte a weight; some ten passes over the sparse weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.ranges import FRACTION, between, log, number, whole
from nmrun.recipes.adam_decay import AdamDecay
from nmrun.sparsity.weight import SparseWeight


@dataclass
class AST(AdamDecay):
    """Retraining with annealed SR-STE.

    Args:
        decay: the paper's lambda at the end of its rise.
        rise: the fraction of all steps in which it rises.
        interval: optimizer steps that a mask stays.
    """

    name: ClassVar[str] = "ast"
    needs_total_steps: ClassVar[str] = "its decay rises over a fraction of the run"

    decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 1e-4
    rise: Annotated[float, FRACTION, between(0.0, 0.5)] = 0.25
    interval: Annotated[int, whole(1)] = 10

    @property
    def factor(self) -> float:
        """The decay factor of this step."""
        rises = self.rise * (self.total_steps or 0)
        return self.decay * min(1.0, self.step / rises) if rises else self.decay

    def update(self, weight: SparseWeight, m1: Tensor) -> Tensor:
        return torch.where(weight["mask"], m1, m1 + self.factor * weight.dense)

    def metrics(self) -> dict[str, float]:
        return {"ast/decay": self.factor}
