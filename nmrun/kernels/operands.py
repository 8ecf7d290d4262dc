"""What one optimizer step with a rule reads and writes for one weight."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.rule import Rule


class Update(NamedTuple):
    """The recipe's part of one step for one weight: ``dense`` is what the step moves, ``projected``
    where its projection goes, ``dim`` the dimension that groups run along."""

    dense: Tensor
    projected: Tensor
    dim: int
    pattern: Pattern
    rule: Rule


class Operands(NamedTuple):
    """An :class:`Update` with Adam's tensors: ``second`` is the second moment, or with ``frozen`` a
    constant denominator; ``steps`` counts this step too."""

    update: Update
    grad: Tensor
    first: Tensor
    second: Tensor
    steps: float
    frozen: bool

    @property
    def all(self) -> list[Tensor]:
        """The tensors of the weight's shape, in the kernels' order."""
        return [self.update.dense, self.grad, self.first, self.second, self.update.projected]


def decoupled(group: dict[str, Any]) -> bool:
    """Whether a parameter group's weight decay is AdamW's."""
    return bool(group.get("decoupled_weight_decay", False))


def scalars(group: dict[str, Any], steps: float, rule: Rule) -> list[float]:
    """What the kernels need of a parameter group for step number ``steps`` (from 1), in double
    precision."""
    (beta1, beta2), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
    return [
        1 - lr * weight_decay,
        0.0 if decoupled(group) else weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**steps) ** 0.5,
        group["eps"],
        -lr / (1 - beta1**steps),
        rule.pruned_gradient_decay,
        rule.pruned_gradient_factor,
        rule.pruned_weight_factor,
    ]
