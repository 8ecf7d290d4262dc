"""T-SR-STE: transposable masks with masked decay on the gradient (Hu et al. 2024, arXiv 2404.01847).

Every M x M block of a weight keeps N in each row and each column, so that the forward product and the one for the input's gradient
both have an N:M operand. The mask stays for ``interval`` steps; the gradient becomes ``g + decay * (1 - m) * w`` once per optimizer step.
The paper ends with a sixth of the training dense (``dense_end=0.1667``), and then its network is dense too: by default 0 here, so that
every recipe's result is N:M. When to use: pre-training where both products should be fast. Cost: the mask search every ``interval`` steps
(exact: all 90 patterns for 2:4, an assignment problem a block for 1:M, a linear programme a block beyond), else SR-STE's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.recipes.base import Densities, decay_pruned
from nmrun.recipes.held import HeldMask
from nmrun.sparsity.weight import Projection, SparseWeight


class TSRSTE(HeldMask):
    """``decay``: lambda_W; the authors' scripts have 6e-6 (BERT), 6e-5 to 2e-4 (GPT-2), 6e-3 (DeiT). ``recipe.decay=auto`` on the command
    line finds one by the flip rate (see ``nmrun.train.decay_search``). ``interval``: steps between masks (40; DeiT 10). ``dense_end``: fraction.
    """

    name: ClassVar[str] = "t_sr_ste"
    chooses_largest = True

    def __init__(
        self, pattern: Pattern, total_steps: int | None = None, *, decay: float = 2e-4, interval: int = 40, dense_end: float = 0.0
    ) -> None:  # fmt: skip
        super().__init__(pattern, total_steps, interval)
        if not decay >= 0:
            raise ValueError(f"t_sr_ste: decay={decay} must be 0 or more")
        if not 0 <= dense_end < 1:
            raise ValueError(f"t_sr_ste: dense_end={dense_end} must be a fraction of all steps, 0 <= dense_end < 1")
        if dense_end > 0 and total_steps is None:
            raise ValueError("t_sr_ste needs total_steps to know when its dense phase begins")
        self.make_transposable()
        self.decay = decay
        self.dense_from = round((1 - dense_end) * total_steps) if dense_end > 0 and total_steps else None

    def final(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        if self.dense_forward:  # the paper's dense end: what is left is dense, and says so
            out.copy_(dense)
        else:
            self.project(projection, dense, out)

    def densities(self, pattern: Pattern, step: int | None = None, hardware: bool = False) -> Densities:
        at_the_end = step is not None and self.dense_from is not None and step >= self.dense_from
        return Densities() if at_the_end else super().densities(pattern, step, hardware)

    def around(self, projection: Projection) -> Around | None:
        return None if self.dense_forward else Around(projection.pattern, decay=self.decay, mask=projection.get_buffer("mask"))

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if not self.dense_forward:
            decay_pruned(weights, self.decay)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        super().after_step(weights, optimizer)
        if self.step == self.dense_from:
            self.dense_forward = True
            self.events.append(f"step {self.step}: T-SR-STE begins its dense phase; the result will be dense")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.decay = float(state["decay"])
