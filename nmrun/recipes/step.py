"""STEP: learn N:M masks with Adam from a precondition (Lu et al. 2023, arXiv 2302.01172).

Phase one is ordinary dense Adam. At the switch its second moment v is frozen; phase two learns the mask with STE, divides by
the frozen preconditioner, and leaves all other parameters on live Adam. The switch is found by ``AutoSwitch`` (algorithm 2) or
fixed beforehand. When to use: Adam, high sparsity. Cost: phase one is dense plus one pass over the sparse weights for
AutoSwitch's sample; phase two is STE's, and v needs no update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from nmrun import optim
from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.recipes.autoswitch import AutoSwitch
from nmrun.recipes.base import Recipe, decay_pruned
from nmrun.sparsity.weight import Projection, SparseWeight, summed


class STEP(Recipe):
    """``switch``, ``t_min``, ``t_max``: see :class:`AutoSwitch`. ``eps_mode``, ``bias_correction``: how the frozen denominator is formed, see
    ``nmrun.optim.Adam.freeze_second_moment``. ``decay``: SR-STE's lambda in phase two (the paper: 0).
    """

    name: ClassVar[str] = "step"
    by_rows = chooses_largest = True

    def __init__(
        self, pattern: Pattern, total_steps: int | None = None, *, switch: str | float = "auto", t_min: float = 0.1,
        t_max: float = 0.5, eps_mode: str = "inside", bias_correction: bool = True, decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(pattern, total_steps)
        if total_steps is None:
            raise ValueError("step needs total_steps: its switch is clipped to fractions of the run")
        if eps_mode not in optim.EPS_MODES:
            raise ValueError(f"step: eps_mode={eps_mode!r}; allowed are {', '.join(optim.EPS_MODES)}")
        if not decay >= 0:
            raise ValueError(f"step: decay={decay} must be 0 or more")
        self.eps_mode, self.bias_correction, self.decay = eps_mode, bias_correction, decay
        self.autoswitch = AutoSwitch(switch, t_min, t_max, total_steps)
        self.dense_steps = max(1, self.autoswitch.last + int(self.autoswitch.automatic))  # automatic: after t_max
        self.dense_forward = True

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        groups = optim.freezable(optimizer, "step").groups_of([w.dense for w in weights])
        if len({(g["betas"][1], g["eps"]) for g in groups}) > 1:
            raise ValueError("step: the parameter groups with sparse weights must share beta2 and eps, AutoSwitch pools them")
        self.events += self.autoswitch.prepare(groups[0]["betas"][1], groups[0]["eps"], weights[0].dense.device)

    def around(self, projection: Projection) -> Around | None:
        return None if self.dense_forward else self.around_largest(projection.pattern, self.decay)

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if not self.dense_forward:
            decay_pruned(weights, self.decay)
        elif self.autoswitch.automatic:
            adam, dense = optim.freezable(optimizer, "step"), [w.dense for w in weights]
            *sums, _ = adam.second_moment_change(dense, logs=self.autoswitch.geometric)
            total, logs, nonzero = summed(weights, torch.stack(sums)).unbind()
            count = sum(w.shape.numel() for w in weights if w.dense.grad is not None)
            self.autoswitch.sample(total, logs, nonzero, count)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.dense_forward and (why := self.autoswitch.fires(self.step)):
            dense = [w.dense for w in weights]
            optim.freezable(optimizer, "step").freeze_second_moment(dense, self.eps_mode, self.bias_correction)
            self.dense_forward = False
            self.events.append(f"step {self.step}: STEP freezes the second moment and starts learning masks ({why})")

    def metrics(self) -> dict[str, float]:
        return {"step/phase": 1.0, **self.autoswitch.metrics()} if self.dense_forward else {"step/phase": 2.0}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "autoswitch": self.autoswitch.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.autoswitch.load_state_dict(state["autoswitch"])
