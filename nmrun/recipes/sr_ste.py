"""SR-STE: straight-through with a decay of the pruned weights (Zhou et al. 2021, arXiv 2102.04010).

The forward pass uses ``m * w``. The gradient becomes ``g + decay * (1 - m) * w``, which pulls pruned
weights to zero and so calms the mask. The term is added once per optimizer step, to the unscaled and
clipped gradient. The official code adds it inside autograd: once per
micro-batch, divided by the fp16 loss scale and clipped along with the gradient.

Cost: STE's, and one pass over the sparse weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.ranges import log, number
from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class SRSTE(Recipe):
    """STE with a decay of the pruned weights.

    When to use: images from scratch under SGD at 2:4 and 1:4, and fine-tuning from 1:4 on.
    Under Adam tune ``decay``. Its default is the paper's, made for SGD: it does next to nothing in a
    thousand steps of Adam, and helps in longer runs on text. The best value differs by task.

    Args:
        decay: the decay of pruned weights; the paper's lambda_w, 2e-4 there too. Ordinary weight decay acts
            besides, on all weights.
    """

    name: ClassVar[str] = "sr_ste"
    title: ClassVar[str] = "SR-STE"
    masks_are_largest: ClassVar[bool] = True

    decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 2e-4

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(pruned_gradient_decay=self.decay)
