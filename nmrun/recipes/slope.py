"""SLoPe: a mask that stays from the first step on, and double pruning (Mozaffari et al. 2024, arXiv
2405.16325).

The mask is chosen once, on the initial weights; pruned weights stay 0, so the weight's gradient is
masked. The input gradient ``dX = dZ W`` sums over the outputs: there the masked weight is pruned
once more, to N:M along the outputs, by magnitude after every step. So all three products have an
N:M operand or result, and no mask is searched for in training. Not here: the paper's low-rank
adapters of the last 1 % of the steps, new parameters of the network. Its figures without adapters
(rank 0) are those to compare with.

Cost: STE's without the mask search, and a second mask a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from nmrun.products import layer
from nmrun.ranges import one_of
from nmrun.recipes.base import Recipe, drawn_seed, generator_of, keep_mask
from nmrun.rule import Rule
from nmrun.sparsity.masks import nm_mask
from nmrun.sparsity.weight import SparseWeight


@dataclass
class SLoPe(Recipe):
    """A mask of the initial weights that stays; the input gradient prunes once more.

    When to use: long pre-training where the cost of a step counts: the forward mask stays. It was
    compared in retraining alone.

    Args:
        mask: the ``largest`` initial weights, as in the authors' code, or ``random`` ones, drawn anew
            for each seed.

    Grouped convolutions, outputs that M does not divide and what ``layer.install`` leaves alone keep
    the exact input gradient.
    """

    name: ClassVar[str] = "slope"
    title: ClassVar[str] = "SLoPe"

    mask: Annotated[str, one_of("largest", "random")] = "largest"

    @property
    def looks_across_rows(self) -> bool:
        return True

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        seed = drawn_seed() if self.mask == "random" else None
        for place, weight in enumerate(weights):
            scores = weight.dense
            if seed is not None:
                noise = torch.rand(weight.shape, generator=generator_of(seed, place), device="cpu")
                scores = noise.to(scores.device)
            keep_mask(weight, nm_mask(scores, weight.pattern, weight.dim))
            weight.dense.masked_fill_(~weight["mask"], 0.0)
        if exact := layer.prune_again(weights):
            self.say(f"SLoPe leaves the input gradient exact at {', '.join(exact)}")

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(mask=weight["mask"], pruned_gradient_factor=0.0)
