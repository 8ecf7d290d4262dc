"""AutoSwitch: when Adam's second moment has settled enough to be frozen (arXiv 2302.01172,
algorithm 2).

With v_t Adam's second moment and d the number of sparse weights::

    arithmetic   Z_t = (1/d) sum_i |v_t,i - v_t-1,i|
    geometric    Z_t = exp((1/d) sum_i log |v_t,i - v_t-1,i|), over the changes that are not 0
    settled      mean of the last 1 / (1 - beta2) samples Z < eps

eps is Adam's. That threshold is not scale-free: with gradients of rms above 3e-3 it is never
reached, below 1e-3 it always is (at beta2 = 0.999). A relative one, ours, is instead::

    settled      mean of the last samples Z < threshold * (1 - beta2) * mean_i v_t,i

which the loss's scale leaves alone. At first v is smaller than it will be, so that the quotient
begins at ``1 / (1 - beta2)``; steady gradients bring it to about 1, growing ones keep it above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmrun.optim import Adam, second_moment
from nmrun.recipes.switch import Switch
from nmrun.sparsity.shards import summed
from nmrun.sparsity.weight import SparseWeight


class AutoSwitch(Switch):
    """The rule of the paper.

    Args:
        geometric: the geometric mean of the changes, not the arithmetic one.
        partial: average over the samples that there are; else all of the window have to be there.
            The paper's text does not say which (as far as we know), the code at
            huyz2023/2by4-pretrain takes those that there are.
        threshold: the relative one (above 1, say 1.2); None: Adam's eps, as in the paper.
        t_min, t_max, total_steps: see :class:`Switch`.
    """

    def __init__(
        self,
        geometric: bool,
        partial: bool,
        threshold: float | None,
        t_min: float,
        t_max: float,
        total_steps: int,
    ) -> None:
        super().__init__(t_min, t_max, total_steps)
        self.geometric, self.partial, self.threshold = geometric, partial, threshold
        self.eps = float("nan")
        # what the mean of samples is compared to: (1 - beta2) times that of v
        self.size = torch.ones((), dtype=torch.float64)
        self.rest = float("nan")  # 1 - beta2

    @property
    def ready(self) -> bool:
        return self.samples >= (1 if self.partial else len(self.window))

    def prepare(self, beta2: float, eps: float, device: torch.device) -> list[str]:
        said = super().prepare(beta2, eps, device)
        self.eps, self.rest, self.size = float(eps), 1 - float(beta2), self.size.to(device)
        if len(self.window) > self.last and not self.partial:
            said.append(f"STEP switches at step {self.last + 1} (t_max)")
        return said

    def observe(self, weights: Sequence[SparseWeight], adam: Adam) -> None:
        parameters = [weight.parameter for weight in weights]
        count = sum(weight.shape.numel() for weight in weights if weight.grad is not None)
        if not count:
            return
        *sums, _ = second_moment.change(adam, parameters, logs=self.geometric)
        total, logs, nonzero = summed(weights, torch.stack(sums)).unbind()
        self.keep((logs / nonzero).exp().nan_to_num(0.0) if self.geometric else total / count)
        if self.threshold is not None:
            total = summed(weights, second_moment.total(adam, parameters))
            self.size = self.rest * total / count

    def measure(self) -> Tensor:
        mean = self.window[: self.samples].mean()
        return mean if self.threshold is None else mean / self.size

    def has_settled(self, measure: float) -> bool:
        return measure < (self.eps if self.threshold is None else self.threshold)

    def said(self) -> str:
        full, mean = min(self.samples, len(self.window)), self._mean()
        said = f"mean change {mean:.2g} over {full} of {len(self.window)} samples, threshold "
        if self.threshold is None:
            return f"{said}eps = {self.eps:.0e}"
        return f"{said}{self.threshold:g} times {float(self.size):.2g}, that of steady gradients"

    def metrics(self) -> dict[str, float]:
        """The last sample and the window's mean so far, and the relative one where that counts."""
        if not self.samples:
            return {}
        found = {
            "step/variance_change": float(self.window[(self.samples - 1) % len(self.window)]),
            "step/variance_change_window": self._mean(),
        }
        if self.threshold is not None and self.size:  # 0 where all gradients were
            found["step/variance_change_relative"] = self._mean() / float(self.size)
        return found

    def _mean(self) -> float:
        return float(self.window.sum()) / max(1, min(self.samples, len(self.window)))

    def state_dict(self) -> dict[str, Any]:
        size = {} if self.threshold is None else {"size": self.size.clone()}
        return {**super().state_dict(), **size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "size" in state:
            self.size = state["size"].to(self.window.device)
        super().load_state_dict(state)
