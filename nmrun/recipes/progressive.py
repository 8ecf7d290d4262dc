"""What mask decay and structure decay share: a timeline of three phases, and a projection that tightens in the middle one.

Kao et al. 2022 (arXiv 2209.07617) and Bambhaniya et al. 2024 (arXiv 2402.04744). A run of n steps is dense for a fraction ``dense``
of them, N:M exactly for the last fraction ``final``, and in between goes from one to the other:

- mask decay: ``w * (m + (1 - m) * D)``, D falling from 1 to 0;
- structure decay: hard masks of denser or coarser patterns, one after the other, down to N:M.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmrun import kernels
from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.recipes.base import Densities, Recipe, keep_largest
from nmrun.sparsity.weight import Projection, SparseWeight

GRAD_MODES = ("scaled", "ste")


class Progressive(Recipe):
    """``dense``, ``final``: fractions of all steps, as above; together at most 1, and ``final`` above 0, so that the run ends at N:M.

    Subclasses override :meth:`factor` (D; here 0) or :meth:`frames` (the patterns in order; here the target alone).
    """

    grad_mode = "ste"
    by_rows = True

    def __init__(self, pattern: Pattern, total_steps: int | None, dense: float, final: float) -> None:
        super().__init__(pattern, total_steps)
        if total_steps is None:
            raise ValueError(f"{self.name} needs total_steps: its phases are fractions of the run")
        if not (dense >= 0 and final > 0 and dense + final <= 1):
            raise ValueError(
                f"{self.name}: dense={dense} and final={final} must be fractions of all steps with dense + final <= 1 "
                "and final above 0, else the run does not end at N:M"
            )
        self.begins, self.ends = round(dense * total_steps), min(total_steps - 1, round((1 - final) * total_steps))
        self.begins = min(self.begins, self.ends)
        self.length = self.ends - self.begins  # steps of the middle phase
        self.dense_forward = self.begins > 0
        self.patterns = [pattern]

    def factor(self) -> float:
        """D at this step: what pruned weights are multiplied by."""
        return 0.0

    def frames(self, target: Pattern) -> list[Pattern]:
        """The patterns that the middle phase goes through, in equal parts, ending with ``target``."""
        return [target]

    def now(self, target: Pattern) -> Pattern:
        """The pattern of this step for a weight that is to end at ``target``."""
        frames = self.frames(target)
        if self.step >= self.ends:
            return target
        return frames[max(0, self.step - self.begins) * len(frames) // self.length]

    @property
    def is_sparse(self) -> bool:
        return not self.dense_forward and self.factor() == 0.0 and all(self.now(p) == p for p in self.patterns)

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.patterns = sorted({weight.pattern for weight in weights})
        for weight in weights:
            largest, inputs = max(p.m for p in self.frames(weight.pattern)), weight.shape[weight.dim]
            if inputs % largest and not weight.pattern.length:
                raise ValueError(
                    f"{self.name}: {weight.name} has {inputs} inputs, not a multiple of the {largest} of its coarsest pattern "
                    f"{max(self.frames(weight.pattern), key=lambda p: p.m)} (fewer frames, the option pad, or leave that layer out)"
                )

    def densities(self, pattern: Pattern, step: int | None = None, hardware: bool = False) -> Densities:
        then = copy.copy(self)
        if step is not None:
            then.step, then.dense_forward = step, step < self.begins
        if then.dense_forward or then.factor():
            return Densities()
        then.dense_steps = 0
        return Recipe.densities(then, then.now(pattern), 0, hardware)

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        pattern, factor = self.now(projection.pattern), self.factor()
        if factor and kernels.project(dense, out, pattern, projection.dim, factor=factor):
            return
        keep_largest(dense, out, pattern, projection.dim)
        if factor:
            out.add_(dense - out, alpha=factor)  # the difference is (1 - m) * w, exactly

    def around(self, projection: Projection) -> Around | None:
        if self.dense_forward:
            return None
        then = copy.copy(self)  # the gradient is of this step's weights, the projection for the next step
        then.step += 1
        spared = 1.0 if self.grad_mode == "ste" else self.factor()
        return Around(then.now(projection.pattern), spared=spared, factor=then.factor())

    @torch.no_grad()
    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.grad_mode == "ste" or self.dense_forward:
            return
        factor = self.factor()
        for weight in weights:  # pruned is what the projection changed; where a weight is 0 that cannot be told, and need not
            if (grad := weight.dense.grad) is not None:
                kept = weight.projection.projected == weight.dense
                # exactly 1 or the factor; torch.where takes four times as long on a CPU
                grad.mul_(torch.lerp(grad.new_full((), factor), grad.new_ones(()), kept.to(grad.dtype)))

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        was_dense, self.dense_forward = self.dense_forward, self.step < self.begins
        if was_dense and not self.dense_forward:
            self.events.append(f"step {self.step}: {self.name} ends its dense phase")
        if self.step == self.ends:
            self.events.append(f"step {self.step}: {self.name} has arrived at {self.pattern}")


def linear(tau: float | None, length: int, j: int) -> float:
    """``max(0, 1 - tau j)``; by default tau is 1 / length, so that D is 0 just when the final phase begins."""
    return max(0.0, 1.0 - j * (1.0 / max(1, length) if tau is None else tau))


def exponential(tau: float | None, length: int, j: int) -> float:
    """``exp(-tau j)``; by default tau is ln(1000) / length, so that D falls to a thousandth before the final phase sets it to 0."""
    return math.exp(-j * (math.log(1000.0) / max(1, length) if tau is None else tau))
