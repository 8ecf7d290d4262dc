"""S-STE: continuous pruning by a soft threshold with a frozen scale (Hu et al. 2024, arXiv 2409.09099).

The forward pass uses ``beta * S(w)``: S shrinks every magnitude by the group's (N+1)-th largest one, which makes the sparse weight a
continuous function of the dense one, and beta, fitted to the initial weights by least squares and never changed, restores the
lost norm. The gradient of ``beta * S(w)`` reaches w unchanged: neither multiplied by beta nor masked.
When to use: pre-training at 2:4. Beyond half sparsity (1:4, 1:16) beta is large and depends on the initial distribution; the paper does not
go there. Cost: STE's. The paper's FP8 and gradient estimators are not part of this recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nmrun import kernels
from nmrun.kernels.adam import Around
from nmrun.recipes.base import Recipe
from nmrun.sparsity import masks
from nmrun.sparsity.weight import Projection, SparseWeight


class SSTE(Recipe):
    """Soft threshold with frozen scale; no hyperparameters. The scale is a saved buffer of each projection."""

    name: ClassVar[str] = "s_ste"
    by_rows = True  # the scale is of the initial weights, which every process has whole

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            scale = masks.soft_threshold_scale(weight.dense, weight.pattern, weight.dim)
            weight.projection.register_buffer("scale", scale)

    def around(self, projection: Projection) -> Around:
        return Around(projection.pattern, scale=projection.get_buffer("scale"))

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        scale = projection.get_buffer("scale")
        if not kernels.project(dense, out, projection.pattern, projection.dim, soft=True, scale=scale):
            torch.mul(masks.soft_threshold(dense, projection.pattern, projection.dim), scale, out=out)
