"""SdGf, structure decay gradient flow: the pattern tightens in frames of equal length.

After Bambhaniya et al. 2024 (arXiv 2402.04744). Hard masks throughout, straight-through gradient.
Stepwise: ``M-1:M, M/2:M, ..., N:M``, ever sparser. Geometric: ``8N:8M, 4N:4M, 2N:2M, N:M``, always
as sparse as the target in ever smaller groups, or with ``densify``, an ablation of the authors'
code, ``N:8M, N:4M, N:2M, N:M``: ever denser. When to use: above 80 % sparsity; geometric where
training must be sparse from the start. Cost: STE's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun import patterns
from nmrun.patterns import Pattern
from nmrun.ranges import FLAG, whole
from nmrun.recipes.progressive import Progressive


@dataclass
class SdGfStepwise(Progressive):
    """Ever sparser patterns; M / N must be a power of two."""

    name: ClassVar[str] = "sdgf_stepwise"

    def frames_to(self, target: Pattern) -> list[Pattern]:
        return patterns.stepwise(target)


@dataclass
class SdGfGeometric(Progressive):
    """The same density in ever smaller groups.

    Args:
        frames: how many patterns, 4 in the authors' code; a layer's inputs must be a multiple of
            M * 2^(frames - 1).
        densify: every pattern has the target's N instead of its density (an ablation).
    """

    name: ClassVar[str] = "sdgf_geometric"

    frames: Annotated[int, whole(1)] = 4
    densify: Annotated[bool, FLAG] = False

    def frames_to(self, target: Pattern) -> list[Pattern]:
        return patterns.geometric(target, self.frames, self.densify)


@dataclass
class DecayStructure(SdGfStepwise):
    """Decaying pruning mask, structure form (Kao et al. 2022, arXiv 2209.07617), SdGf's
    predecessor.
    """

    name: ClassVar[str] = "decay_structure"
