"""A switch by the norm of Adam's second moment, after 1-bit Adam (Tang et al. 2021, arXiv
2102.02888), one of the two rules that STEP's paper compares AutoSwitch with::

    settled   ||v_t-D||_1 / ||v_t||_1 > 0.96,   D = 1 / (1 - beta2)

It looks at the sum over all weights alone: changes that cancel out are not seen, and a falling
variance counts as settled. Form and constant are as they are commonly reported; the paper's own
run of this rule could not be looked up. Clipped to t_min and t_max like AutoSwitch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nmrun.optim import Adam, second_moment
from nmrun.recipes.switch import Switch, steps_of
from nmrun.sparsity.shards import summed
from nmrun.sparsity.weight import SparseWeight

RATIO = 0.96


class VarianceRatio(Switch):
    """The window holds ``||v||_1`` of the steps t - D to t."""

    def length(self, beta2: float) -> int:
        return steps_of(beta2) + 1

    def observe(self, weights: Sequence[SparseWeight], adam: Adam) -> None:
        self.keep(summed(weights, second_moment.total(adam, [w.parameter for w in weights])))

    def measure(self) -> Tensor:
        oldest, newest = self.samples % len(self.window), (self.samples - 1) % len(self.window)
        return self.window[oldest] / self.window[newest]

    def has_settled(self, measure: float) -> bool:
        return measure > RATIO

    def said(self) -> str:
        return f"ratio of variances {float(self.measure()):.3g}, threshold {RATIO}"

    def metrics(self) -> dict[str, float]:
        """The ratio, once there is one."""
        return {"step/variance_ratio": float(self.measure())} if self.ready else {}
