"""What mask decay and structure decay share: a timeline of three phases that ends at N:M.

Kao et al. 2022 (arXiv 2209.07617) and Bambhaniya et al. 2024 (arXiv 2402.04744). A run of n steps
is dense for a fraction ``dense`` of them, N:M exactly for the last fraction ``final``, and in
between goes from one to the other:

- mask decay: ``w * (m + (1 - m) * D)``, D falling from 1 to 0;
- structure decay: hard masks of denser or coarser patterns, one after the other, down to N:M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from nmrun.patterns import Pattern
from nmrun.ranges import FRACTION, between, number
from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class Progressive(Recipe):
    """Subclasses override :meth:`factor` (D; here 0) or :meth:`frames` (the patterns in order).

    Args:
        dense: the fraction of all steps that is dense, at the beginning; this default and the next
            are ours, the papers' differ by model.
        final: the fraction at the end that is N:M exactly; with ``dense`` at most 1.
    """

    needs_total_steps: ClassVar[str] = "its phases are fractions of the run"

    dense: Annotated[float, FRACTION, between(0.0, 0.4)] = 0.1
    final: Annotated[float, number(0, 1, open_low=True), between(0.05, 0.5)] = 0.2

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        assert total_steps is not None
        if self.dense + self.final > 1:
            raise ValueError(
                f"{self.name}: dense={self.dense} and final={self.final} are fractions of one run: at most 1 together"
            )
        self.ends = min(total_steps - 1, round((1 - self.final) * total_steps))
        self.begins = min(self.ends, round(self.dense * total_steps))
        self.length = self.ends - self.begins  # steps of the middle phase
        self.dense_forward = self.begins > 0
        self.patterns = [pattern]

    def factor(self) -> float:
        """D at this step: what pruned weights are multiplied by."""
        return 0.0

    def frames_to(self, target: Pattern) -> list[Pattern]:
        """The patterns of the middle phase, in equal parts, ending with ``target``."""
        return [target]

    def now(self, target: Pattern) -> Pattern:
        """The pattern of this step for a weight that is to end at ``target``."""
        frames = self.frames_to(target)
        if self.step >= self.ends:
            return target
        return frames[max(0, self.step - self.begins) * len(frames) // self.length]

    @property
    def is_sparse(self) -> bool:
        at_target = self.factor() == 0.0 and all(self.now(p) == p for p in self.patterns)
        return not self.dense_forward and at_target

    def planned_dense(self, step: int) -> bool:
        with self.at(step):
            return step < self.begins or self.factor() != 0

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.patterns = sorted({weight.pattern for weight in weights})
        for weight in weights:
            coarsest = max(self.frames_to(weight.pattern), key=lambda p: p.m)
            inputs = weight.shape[weight.dim]
            if inputs % coarsest.m and not weight.pattern.length:
                raise ValueError(
                    f"{self.name}: {weight.name} has {inputs} inputs, not a multiple of the "
                    f"{coarsest.m} of its coarsest pattern {coarsest} (fewer frames, the option "
                    "pad, or leave that layer out)"
                )

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(pattern=self.now(weight.pattern), pruned_weight_factor=self.factor())

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        was_dense, self.dense_forward = self.dense_forward, self.step < self.begins
        if was_dense and not self.dense_forward:
            self.say(f"{self.name} ends its dense phase")
        if self.step == self.ends:
            self.say(f"{self.name} has arrived at {self.pattern}")
