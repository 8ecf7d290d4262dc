"""S-STE: continuous pruning by a soft threshold with a frozen scale (arXiv 2409.09099).

After Hu et al. 2024. The forward pass uses ``beta * S(w)``: S shrinks every magnitude by the
group's (N+1)-th largest one, which makes the sparse weight a continuous function of the dense one.
beta is fitted to the initial weights by least squares and never changed; it restores the lost norm.
The gradient of ``beta * S(w)`` reaches w unchanged: neither multiplied by beta nor masked. When to
use: pre-training at 2:4. Beyond half sparsity (1:4, 1:16) beta is large and depends on the initial
distribution; the paper does not go there. Cost: STE's. The paper's FP8 and gradient estimators are
options of ``nmrun.sparsify``, not of this recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity import masks
from nmrun.sparsity.weight import SparseWeight


@dataclass
class SSTE(Recipe):
    """The soft threshold; no hyperparameters. The scale is kept with each weight."""

    name: ClassVar[str] = "s_ste"

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            whole = weight.whole(weight.dense)
            weight["scale"] = masks.soft_threshold_scale(whole, weight.pattern, weight.dim)

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(soft_threshold_scale=weight["scale"])
