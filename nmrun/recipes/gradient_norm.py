"""A switch by the norm of the gradient, after Accordion (Agarwal et al. 2021, arXiv 2010.16248),
one of the two rules that STEP's paper compares AutoSwitch with::

    settled   | ||g_t-D|| - ||g_t|| | / ||g_t-D|| < 0.5,   D = 1 / (1 - beta2)

Condition and constant are those of its code (uw-mad-dash/Accordion), which compares, layer by
layer, gradients added up over an epoch with those ten epochs before. Here the norm is over all
sparse weights, of single steps, and D steps apart as in the rule by variances: STEP's own form
could not be looked up. Clipped to t_min and t_max like AutoSwitch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmrun.optim import Adam
from nmrun.recipes.switch import Switch, steps_of
from nmrun.sparsity.shards import summed
from nmrun.sparsity.weight import SparseWeight

CHANGE = 0.5


class GradientNorm(Switch):
    """The window holds ``||g||`` of the steps t - D to t."""

    def length(self, beta2: float) -> int:
        return steps_of(beta2) + 1

    def observe(self, weights: Sequence[SparseWeight], adam: Adam) -> None:
        squares = [w.grad.double().square().sum() for w in weights if w.grad is not None]
        if squares:
            self.keep(summed(weights, torch.stack(squares).sum()).sqrt())

    def measure(self) -> Tensor:
        oldest, newest = self.samples % len(self.window), (self.samples - 1) % len(self.window)
        return (self.window[oldest] - self.window[newest]).abs() / self.window[oldest]

    def has_settled(self, measure: float) -> bool:
        return measure < CHANGE

    def said(self) -> str:
        return f"change of the gradient's norm {float(self.measure()):.3g}, threshold {CHANGE}"

    def metrics(self) -> dict[str, float]:
        """The change, once there is one."""
        return {"step/gradient_norm_change": float(self.measure())} if self.ready else {}
