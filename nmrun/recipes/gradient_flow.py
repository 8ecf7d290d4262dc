"""Progressive gradient flow: MdGf, mask decay, and SdGf, structure decay.

After Bambhaniya et al. 2024 (arXiv 2402.04744). A run is dense for a fraction ``dense`` of its steps
and N:M exactly for the last fraction ``final``. In between it goes from one to the other.

- MdGf: pruned weights fade out. Forward ``w * (m + (1 - m) * D(j))``, j the steps since the dense
  phase, the mask m chosen anew at every step. D falls linearly or exponentially from 1 to 0. The
  gradient is that of this product, so pruned weights receive less and less of it
  (``grad_mode="scaled"``, the paper's idea); the authors' code passes it on unchanged (``"ste"``).
- SdGf: the pattern tightens in frames of equal length, with hard masks and the straight-through
  gradient. Stepwise, ever sparser: ``M-1:M, M/2:M, ..., N:M``. Geometric, as sparse as the target
  in ever smaller groups: ``8N:8M, 4N:4M, 2N:2M, N:M``. With ``densify``, an ablation of the
  authors' code, ever denser: ``N:8M, N:4M, N:2M, N:M``.

Cost: STE's. MdGf also has one pass over the sparse weights for the faded part and one for the
gradient, and dense products until D is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError
from nmrun.ranges import FLAG, FRACTION, between, number, one_of, whole
from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity.layers import parts_of
from nmrun.sparsity.weight import SparseWeight


@dataclass
class Progressive(Recipe):
    """The timeline that both share.

    Subclasses override :meth:`factor` (D; here 0) or :meth:`frames_to` (the patterns in order).

    Args:
        dense: the fraction of all steps at the beginning that is dense. Its default and that of
            ``final`` are ours; the papers' differ by model.
        final: the fraction of all steps at the end that is N:M exactly; with ``dense`` at most 1.
    """

    needs_total_steps: ClassVar[str] = "its phases are fractions of the run"

    dense: Annotated[float, FRACTION, between(0.0, 0.4)] = 0.1
    final: Annotated[float, number(0, 1, open_low=True), between(0.05, 0.5)] = 0.2

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        assert total_steps is not None
        if self.dense + self.final > 1:
            raise ConfigError(
                f"{self.name}: dense={self.dense} and final={self.final} are fractions of one run: at most 1 together"
            )
        self.ends = min(total_steps - 1, round((1 - self.final) * total_steps))
        self.begins = min(self.ends, round(self.dense * total_steps))
        self.length = max(
            1, self.ends - self.begins
        )  # steps of the middle phase, which may have none
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
            parts = parts_of(weight.module, weight.attribute, weight.dim)
            inputs = weight.dense.shape[weight.dim] // parts  # those of this process
            if inputs % coarsest.m and (parts > 1 or not weight.pattern.length):
                of_group = " of one group" if parts > 1 else ""
                raise ConfigError(
                    f"{self.name}: {weight.name} has {inputs} inputs{of_group}, not a multiple of the "
                    f"{coarsest.m} of its coarsest pattern {coarsest} (fewer frames, the option "
                    "pad, or leave that layer out)"
                )

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(pattern=self.now(weight.pattern), pruned_weight_factor=self.factor())

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        was_dense, self.dense_forward = self.dense_forward, self.step < self.begins
        if was_dense and not self.dense_forward:
            self.say(f"{self.name} ends its dense phase", "phase")
        if self.step == self.ends:
            self.say(f"{self.name} has arrived at {self.pattern}", "phase")


@dataclass
class MdGfLinear(Progressive):
    """Pruned weights fade linearly, ``D(j) = max(0, 1 - tau j)``.

    When to use: to compare with ``mdgf_exponential``. It was itself compared on the digits alone.

    Args:
        tau: how fast D falls, per step. By default the fall takes the phase between ``dense`` and ``final``.
        grad_mode: the gradient of pruned weights: ``scaled`` by D, or ``ste``, unchanged.
    """

    name: ClassVar[str] = "mdgf_linear"
    title: ClassVar[str] = "MdGf-Linear"

    tau: Annotated[float | None, number(0, open_low=True, optional=True)] = None
    grad_mode: Annotated[str, one_of("scaled", "ste")] = "scaled"

    def factor(self) -> float:
        if self.step >= self.ends:
            return 0.0
        return self.curve(max(0, self.step - self.begins))

    def curve(self, j: int) -> float:
        """D after j steps of the middle phase; by default 0 at its end."""
        tau = 1.0 / self.length if self.tau is None else self.tau
        return max(0.0, 1.0 - j * tau)

    def rule(self, weight: SparseWeight) -> Rule:
        rule, scaled = super().rule(weight), self.grad_mode == "scaled"
        return replace(rule, pruned_gradient_factor=rule.pruned_weight_factor if scaled else 1.0)

    def metrics(self) -> dict[str, float]:
        return {f"{self.name}/factor": self.factor()}


@dataclass
class MdGfExponential(MdGfLinear):
    """Pruned weights fade exponentially, ``D(j) = exp(-tau j)``.

    When to use: a translation model from scratch, for nearly as many
    multiplications as dense training, and a language model in ten thousand steps. Not one in
    a thousand steps.
    """

    name: ClassVar[str] = "mdgf_exponential"
    title: ClassVar[str] = "MdGf-Exponential"

    def curve(self, j: int) -> float:
        # by default D falls to a thousandth before the final phase sets it to 0
        tau = math.log(1000.0) / self.length if self.tau is None else self.tau
        return math.exp(-j * tau)


@dataclass
class SdGfStepwise(Progressive):
    """STE with ever sparser patterns, M-1:M to N:M. M / N must be a power of two.

    When to use: images from scratch, from 1:8 on. Not text.
    """

    name: ClassVar[str] = "sdgf_stepwise"
    title: ClassVar[str] = "SdGf-Stepwise"

    def frames_to(self, target: Pattern) -> list[Pattern]:
        ratio = target.m // target.n
        if target.m % target.n or ratio & (ratio - 1):
            raise PatternError(
                f"stepwise structure decay halves M until it is N; for {target}, M / N is not a power of two"
            )
        first = replace(target, n=max(target.m - 1, target.n))
        halves = [replace(target, n=target.m >> i) for i in range(1, ratio.bit_length())]
        return list(dict.fromkeys([first, *halves, target]))


@dataclass
class SdGfGeometric(Progressive):
    """STE with the final density in ever smaller groups, 8N:8M to N:M.

    When to use: where training must have its final density from the start. On
    images at 1:16 it was no better than STE.

    Args:
        frames: how many patterns, 4 in the authors' code. A layer's inputs must be a multiple of
            M * 2^(frames - 1).
        densify: every pattern has the target's N instead of its density (an ablation).
    """

    name: ClassVar[str] = "sdgf_geometric"
    title: ClassVar[str] = "SdGf-Geometric"

    frames: Annotated[int, whole(1)] = 4
    densify: Annotated[bool, FLAG] = False

    def frames_to(self, target: Pattern) -> list[Pattern]:
        times = [1 << i for i in reversed(range(self.frames))]
        kept = [target.n if self.densify else target.n * k for k in times]
        return [replace(target, n=n, m=target.m * k) for n, k in zip(kept, times, strict=True)]
