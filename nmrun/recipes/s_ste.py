"""S-STE: continuous pruning by a soft threshold with a frozen scale (arXiv 2409.09099).

After Hu et al. 2024. The forward pass uses ``beta * S(w)``: S shrinks every magnitude by the
group's (N+1)-th largest one, which makes the sparse weight a continuous function of the dense one.
beta is fitted to the initial weights by least squares and never changed; it restores the lost norm.
The gradient of ``beta * S(w)`` reaches w unchanged: neither multiplied by beta nor masked.

Cost: STE's. The hyperparameters are the paper's ablations, which its defaults won. The paper's FP8
and gradient estimators are options of ``nmrun.sparsify``, not of this recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.ranges import number, one_of, whole
from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity import masks
from nmrun.sparsity.weight import SparseWeight


@dataclass
class SSTE(Recipe):
    """STE with a soft threshold, times a scale that is kept with each weight.

    When to use: a language model from scratch, and where nothing but the learning rate can be
    tuned. Not in fine-tuning.

    Args:
        gamma: where the threshold lies between the (N+1)-th largest magnitude (0) and the N-th (1)
            of a group (the paper's table 1 varies a gamma; that it is this one is our reading).
            Only 0 has a kernel of its own.
        fit: how the scale is fitted to the weights: ``mse``, nearest in the mean square, or
            ``l1``, with the same sum of magnitudes (table 2).
        beta: one scale for all weights, in place of fitted ones; 1 is none (table 2, figure 4a).
        interval: steps between fits of the scale (figures 4b and 4c). By default there is one fit,
            to the initial weights.
    """

    name: ClassVar[str] = "s_ste"
    title: ClassVar[str] = "S-STE"

    gamma: Annotated[float, number(0, 1, open_high=True)] = 0.0
    fit: Annotated[str, one_of("mse", "l1")] = "mse"
    beta: Annotated[float | None, number(0, open_low=True, optional=True)] = None
    interval: Annotated[int | None, whole(1, optional=True)] = None
    refitted: Sequence[SparseWeight] = field(init=False, repr=False, default=())

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        if self.beta is not None and (self.interval is not None or self.fit != "mse"):
            raise ConfigError(
                "s_ste: fit and interval are of a fitted scale, and beta is a fixed one"
            )

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            weight["scale"] = self.fitted(weight)
        self.refitted = weights if self.interval is not None else ()

    def fitted(self, weight: SparseWeight) -> torch.Tensor:
        """The scale that fits the dense weight, or the fixed one: 0-dimensional."""
        if self.beta is not None:
            return weight.dense.new_full((), self.beta)
        return masks.soft_threshold_scale(
            weight.whole(weight.dense), weight.pattern, weight.dim, gamma=self.gamma, fit=self.fit
        )

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(soft_threshold_scale=weight["scale"], soft_threshold_gamma=self.gamma)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.interval is not None and self.step % self.interval == 0:
            for weight in weights:
                weight["scale"].copy_(self.fitted(weight))

    def metrics(self) -> dict[str, float]:
        scales = [float(weight["scale"]) for weight in self.refitted]
        if not scales:
            return {}
        return {"s_ste/scale": sum(scales) / len(scales), "s_ste/largest_scale": max(scales)}
