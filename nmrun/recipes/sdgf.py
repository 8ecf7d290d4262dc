"""SdGf, structure decay gradient flow (Bambhaniya et al. 2024, arXiv 2402.04744): the pattern tightens in frames of equal length.

Hard masks throughout, straight-through gradient. Stepwise: ``M-1:M, M/2:M, ..., N:M``, ever sparser. Geometric: ``8N:8M, 4N:4M,
2N:2M, N:M``, always as sparse as the target in ever smaller groups. When to use: above 80 % sparsity; geometric where training must
be sparse from the start. Cost: STE's.
"""

from __future__ import annotations

from typing import ClassVar

from nmrun import patterns
from nmrun.patterns import Pattern
from nmrun.recipes.progressive import Progressive


class SdGfStepwise(Progressive):
    """``dense``, ``final``: see :class:`Progressive`; the defaults are ours, the paper's differ by model. M / N must be a power of two."""

    name: ClassVar[str] = "sdgf_stepwise"

    def __init__(self, pattern: Pattern, total_steps: int | None = None, *, dense: float = 0.1, final: float = 0.2) -> None:
        super().__init__(pattern, total_steps, dense, final)

    def frames(self, target: Pattern) -> list[Pattern]:
        return patterns.stepwise(target)


class SdGfGeometric(Progressive):
    """``frames``: how many patterns, 4 in the authors' code; a layer's inputs must be a multiple of M * 2^(frames - 1).

    ``dense``, ``final``: see :class:`Progressive`.
    """

    name: ClassVar[str] = "sdgf_geometric"

    def __init__(
        self, pattern: Pattern, total_steps: int | None = None, *, frames: int = 4, dense: float = 0.1, final: float = 0.2
    ) -> None:
        super().__init__(pattern, total_steps, dense, final)
        if frames < 1:
            raise ValueError(f"sdgf_geometric: frames={frames} must be 1 or more")
        self.count = frames

    def frames(self, target: Pattern) -> list[Pattern]:
        return patterns.geometric(target, self.count)
