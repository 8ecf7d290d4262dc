"""What AST and CAST share: a decay of the pruned weights inside Adam's step, without momentum.

With Adam's moments m1 and v, after t steps::

    m1 = beta1 * m1 + (1 - beta1) * g
    u  = m1, or what the recipe makes of it for pruned weights
    v  = beta2 * v + (1 - beta2) * u^2
    w  = w - lr / (1 - beta1^t) * u / (sqrt(v / (1 - beta2^t)) + eps)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmrun.kernels.layout import local
from nmrun.kernels.operands import decoupled
from nmrun.recipes.periodic_mask import PeriodicMask
from nmrun.sparsity.weight import SparseWeight


class AdamDecay(PeriodicMask):
    """The recipe steps the sparse weights itself; all other parameters are the optimizer's."""

    def update(self, weight: SparseWeight, m1: Tensor) -> Tensor:
        """Make u of the first moment; both have the shape of the weight.

        Args:
            weight: the sparse weight.
            m1: its first moment, which stays as it is.
        """
        raise NotImplementedError

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        super().attach(weights, optimizer)
        groups = [_group(weight, optimizer) for weight in weights]
        others = any(group.get("amsgrad") or group.get("maximize") for group in groups)
        if others or not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(
                f"{self.name} changes Adam's step: it takes Adam or AdamW, without amsgrad"
            )

    @torch.no_grad()
    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        for weight in (w for w in weights if w.grad is not None):
            group, state = _group(weight, optimizer), optimizer.state[weight.parameter]
            if not state:  # under the names of Adam, which can go on with them
                on = weight.parameter.device if group.get("fused") else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=on)
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = torch.zeros_like(weight.parameter)
            state["step"] += 1
            self._step(weight, group, local(state["exp_avg"]), local(state["exp_avg_sq"]))
            weight.parameter.grad = None  # stepped: the optimizer passes over it

    def _step(self, weight: SparseWeight, group: dict[str, Any], m1: Tensor, v: Tensor) -> None:
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        w, gradient = weight.dense, weight.grad
        assert gradient is not None
        if decoupled(group):
            w.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(w, alpha=group["weight_decay"])
        m1.lerp_(gradient, 1 - beta1)
        update = self.update(weight, m1)
        v.mul_(beta2).addcmul_(update, update, value=1 - beta2)
        t = self.step + 1
        root = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
        w.addcdiv_(update, root, value=-lr / (1 - beta1**t))


def _group(weight: SparseWeight, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return next(
        group
        for group in optimizer.param_groups
        if any(parameter is weight.parameter for parameter in group["params"])
    )
