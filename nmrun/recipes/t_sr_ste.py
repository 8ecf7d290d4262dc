"""T-SR-STE: transposable masks with masked decay on the gradient (Hu et al. 2024, arXiv
2404.01847).

Every M x M block of a weight keeps N in each row and each column: the forward product and the one
for the input's gradient both have an N:M operand. The mask stays for ``interval`` steps; the
gradient becomes ``g + decay * (1 - m) * w`` once per optimizer step. The paper ends with a sixth of
the training dense (``dense_end=0.1667``), and then its network is dense too. By default it is 0
here, so that every recipe's result is N:M.

Cost: the exact mask search every ``interval`` steps, else SR-STE's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.ranges import FRACTION, log, number, whole
from nmrun.recipes.ste import PeriodicMask
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class TSRSTE(PeriodicMask):
    """SR-STE with masks that are N:M along inputs and outputs, and stay for some steps.

    When to use: pre-training where the forward and the backward product should both be fast. In a
    language model at 2:4 it is behind SR-STE; else it was compared on the digits alone.

    Args:
        decay: the decay of pruned weights, the paper's lambda_W. Its scripts have 6e-6 (BERT), 6e-5 to 2e-4
            (GPT-2), 6e-3 (DeiT).
        interval: optimizer steps that a mask stays (the authors' DeiT: 10).
        dense_end: the fraction of all steps at the end that is dense.
    """

    name: ClassVar[str] = "t_sr_ste"
    title: ClassVar[str] = "T-SR-STE"
    masks_are_largest: ClassVar[bool] = True
    always_transposable: ClassVar[bool] = True

    decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 2e-4
    interval: Annotated[int, whole(1)] = 40
    dense_end: Annotated[float, FRACTION] = 0.0

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        self.dense_from: int | None = None
        if self.dense_end > 0:
            steps = self.need_total_steps("its dense phase is a fraction of the run")
            # a dense step at least, and a sparse one before it: a run of one step has no dense one
            self.dense_from = max(1, min(steps - 1, round((1 - self.dense_end) * steps)))

    @property
    def ends_dense(self) -> str:
        return "dense_end" if self.planned_dense_end and self.dense_forward else ""

    @property
    def planned_dense_end(self) -> bool:
        return self.dense_from is not None

    def planned_dense(self, step: int) -> bool:
        return self.dense_from is not None and step >= self.dense_from

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(mask=weight["mask"], pruned_gradient_decay=self.decay)

    def project_final(self, weight: SparseWeight, out: Tensor) -> None:
        if self.dense_forward:  # the paper's dense end: what is left is dense, and says so
            out.copy_(weight.dense)
        else:
            self.project(weight, out)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        super().after_step(weights, optimizer)
        if self.step == self.dense_from:
            self.dense_forward = True
            self.say("T-SR-STE begins its dense phase; the result will be dense", "phase")
