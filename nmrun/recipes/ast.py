"""AST, the Adaptive Sparse Trainer: retraining with a decay of the pruned weights that grows (Huang
et al. 2024, arXiv 2407.20584, AAAI 2025).

The forward pass uses ``m * w`` with straight-through gradients; the mask is chosen anew every
``interval`` steps. Pruned weights decay as in SR-STE, by a factor l that rises linearly from 0 to
``decay``. The decay has no momentum, as in the paper: ``u = m1 + l * (1 - m) * w`` in
:class:`AdamDecay`.

The paper's teacher, the dense network, is ``trainer.distill``. Not here: its masks by Wanda's
scores, and its low-rank weights beside the sparse ones (SLoRB).

Cost: a mask byte a weight; some ten passes over the sparse weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.kernels.layout import decoupled, local
from nmrun.optim.adam import first_state
from nmrun.ranges import FRACTION, between, log, number, whole
from nmrun.recipes.ste import PeriodicMask
from nmrun.sparsity.weight import SparseWeight


class AdamDecay(PeriodicMask):
    """A decay of the pruned weights inside Adam's step, without momentum: of AST, and of CAST.

    The recipe steps the sparse weights itself; all other parameters are the optimizer's. With Adam's
    moments m1 and v, after t steps::

        m1 = beta1 * m1 + (1 - beta1) * g
        u  = m1, or what :meth:`update` makes of it for pruned weights
        v  = beta2 * v + (1 - beta2) * u^2
        w  = w - lr / (1 - beta1^t) * u / (sqrt(v / (1 - beta2^t)) + eps)
    """

    def update(self, weight: SparseWeight, m1: Tensor) -> Tensor:
        """Make u of the first moment; both have the shape of the weight."""
        raise NotImplementedError

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        super().attach(weights, optimizer)
        groups = [_group(weight, optimizer) for weight in weights]
        others = any(group.get("amsgrad") for group in groups)
        if others or not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ConfigError(
                f"{self.name} changes Adam's step: it takes Adam or AdamW, without amsgrad"
            )

    @torch.no_grad()
    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        for weight in (w for w in weights if w.grad is not None):
            group, state = _group(weight, optimizer), optimizer.state[weight.parameter]
            if not state:  # Adam can go on with it
                state.update(first_state(group, weight.parameter))
            state["step"] += 1
            self._step(weight, group, state)
            weight.parameter.grad = None  # stepped: the optimizer passes over it

    def _step(self, weight: SparseWeight, group: dict[str, Any], state: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        m1, v, t = local(state["exp_avg"]), local(state["exp_avg_sq"]), float(state["step"])
        w, gradient = weight.dense, weight.grad
        assert gradient is not None
        if decoupled(group):
            w.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(w, alpha=group["weight_decay"])
        m1.lerp_(gradient, 1 - beta1)
        update = self.update(weight, m1)
        v.mul_(beta2).addcmul_(update, update, value=1 - beta2)
        root = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
        w.addcdiv_(update, root, value=-lr / (1 - beta1**t))


@dataclass
class AST(AdamDecay):
    """STE with a decay of pruned weights that grows, to retrain a trained network.

    When to use: retraining a trained language model for a tenth of its original steps, with a dense
    teacher. Tune ``decay`` together with the learning rate.

    Args:
        decay: the decay of pruned weights at the end of its rise, the paper's lambda.
        rise: the fraction of all steps in which the decay rises from 0.
        interval: optimizer steps that a mask stays.
    """

    name: ClassVar[str] = "ast"
    title: ClassVar[str] = "AST"
    needs_total_steps: ClassVar[str] = "its decay rises over a fraction of the run"

    decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 1e-4
    rise: Annotated[float, FRACTION, between(0.0, 0.5)] = 0.25
    interval: Annotated[int, whole(1)] = 10

    @property
    def factor(self) -> float:
        rises = self.rise * (self.total_steps or 0)
        return self.decay * min(1.0, self.step / rises) if rises else self.decay

    def update(self, weight: SparseWeight, m1: Tensor) -> Tensor:
        return torch.where(weight["mask"], m1, m1 + self.factor * weight.dense)

    def metrics(self) -> dict[str, float]:
        return {"ast/decay": self.factor}


def _group(weight: SparseWeight, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return next(
        group
        for group in optimizer.param_groups
        if any(parameter is weight.parameter for parameter in group["params"])
    )
