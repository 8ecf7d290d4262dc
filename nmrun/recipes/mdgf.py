"""MdGf, mask decay gradient flow: pruned weights fade out instead of vanishing.

After Bambhaniya et al. 2024 (arXiv 2402.04744). Forward ``w * (m + (1 - m) * D(j))``, j the steps
since the dense phase, the mask m chosen anew at every step. D falls linearly or exponentially and
is 0 in the final phase. The gradient is that of this product, so pruned weights receive less and
less of it (``grad_mode="scaled"``, the paper's idea); the authors' code passes it on unchanged
(``"ste"``). When to use: above 80 % sparsity. Cost: STE's, one pass over the sparse weights for the
faded part and one for the gradient. The products are dense until D is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.ranges import number, one_of
from nmrun.recipes.progressive import Progressive
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class MdGfLinear(Progressive):
    """Pruned weights fade linearly, ``D(j) = max(0, 1 - tau j)``.

    Args:
        tau: of D, per step; None spreads the decay over the middle phase.
        grad_mode: the gradient of pruned weights: ``scaled`` by D, or ``ste``, unchanged.
    """

    name: ClassVar[str] = "mdgf_linear"

    tau: Annotated[float | None, number(0, open_low=True, optional=True)] = None
    grad_mode: Annotated[str, one_of("scaled", "ste")] = "scaled"

    def factor(self) -> float:
        if self.step >= self.ends:
            return 0.0
        return self.curve(max(0, self.step - self.begins))

    def curve(self, j: int) -> float:
        """D after j steps of the middle phase; by default 0 at its end."""
        tau = 1.0 / max(1, self.length) if self.tau is None else self.tau
        return max(0.0, 1.0 - j * tau)

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(
            pattern=self.now(weight.pattern),
            pruned_weight_factor=self.factor(),
            pruned_gradient_factor=1.0 if self.grad_mode == "ste" else self.factor(),
        )

    def metrics(self) -> dict[str, float]:
        return {f"{self.name}/factor": self.factor()}


@dataclass
class MdGfExponential(MdGfLinear):
    """Pruned weights fade exponentially, ``D(j) = exp(-tau j)``."""

    name: ClassVar[str] = "mdgf_exponential"

    def curve(self, j: int) -> float:
        # by default D falls to a thousandth before the final phase sets it to 0
        tau = math.log(1000.0) / max(1, self.length) if self.tau is None else self.tau
        return math.exp(-j * tau)


@dataclass
class DecayMask(MdGfLinear):
    """Decaying pruning mask, mask form (Kao et al. 2022, arXiv 2209.07617), MdGf's predecessor:
    linear decay with the straight-through gradient."""

    name: ClassVar[str] = "decay_mask"

    grad_mode: Annotated[str, one_of("scaled", "ste")] = "ste"
