"""Adam's step and a recipe's rule in one pass over a weight: C on the CPU, Triton on CUDA devices.

Apart, SR-STE's decay, Adam and the projection move at least 52 bytes a weight through memory.
Adam alone moves 28, and all of it together 36.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nmrun.kernels import cpu, projection
from nmrun.kernels.layout import local, stored_alike
from nmrun.kernels.operands import Operands, Update, scalars
from nmrun.optim.stock import breaks_graph

if TYPE_CHECKING:
    from nmrun.kernels.triton_adamw import FusedAdam


class OnePass:
    """Steps in one pass, and what they keep from one step to the next. ``pending``: the operands of
    the coming step by parameter."""

    def __init__(self) -> None:
        self.pending: dict[Any, Operands] = {}
        # torch's fused step counts on the device, where reading the count would wait: it is known
        # of a tensor as the last step left it, which is (tensor, version, count)
        self._counts: dict[Any, tuple[Tensor, int, float]] = {}
        self._kernels: dict[tuple[Any, ...], FusedAdam] = {}

    def forget(self) -> None:
        """The optimizer's state was replaced: drop what was derived from it."""
        self.pending, self._counts = {}, {}

    def plan(self, group: dict[str, Any], p: Tensor, state: dict[str, Any], update: Update) -> None:
        """Take one parameter into the coming step, if a kernel does it."""
        grad = p.grad
        assert grad is not None
        second, frozen = state.get("frozen_denominator"), "frozen_denominator" in state
        operands = Operands(
            update,
            local(grad),
            local(state["exp_avg"]),
            local(state["exp_avg_sq"] if second is None else second),
            0.0,
            frozen,
        )
        if supports(operands, bool(group["fused"])):
            self.pending[p] = operands

    def begin(self) -> None:
        """A step begins: what others step in it is counted by them alone."""
        self._counts = {p: count for p, count in self._counts.items() if p in self.pending}

    def _count(self, p: Tensor, step: Tensor) -> float:
        """The number of the coming step."""
        counted, version, count = self._counts.get(p, (None, 0, 0.0))
        known = counted is step and version == step._version
        return 1 + (count if known else float(step))

    @breaks_graph
    def step(self, group: dict[str, Any], states: Mapping[Any, dict[str, Any]]) -> list[Tensor]:
        """Step the group's pending parameters: weights, moments and projections; returns them."""
        parameters = [p for p in group["params"] if p in self.pending]
        if not parameters:
            return []
        steps = [states[p]["step"] for p in parameters]
        counts = list(map(self._count, parameters, steps))
        torch._foreach_add_(steps, 1)
        for p, step, count in zip(parameters, steps, counts, strict=True):
            self._counts[p] = step, step._version, count
        operands = [
            self.pending.pop(p)._replace(steps=count)
            for p, count in zip(parameters, counts, strict=True)
        ]
        self._run(group, operands)
        # autograd goes by versions, also that of the parameter whose memory a kernel has written
        torch.autograd.graph.increment_version(parameters)
        for o in operands:
            written = [o.update.dense, o.first, *([] if o.frozen else [o.second])]
            torch.autograd.graph.increment_version(written)
        return parameters

    def _run(self, group: dict[str, Any], operands: Sequence[Operands]) -> None:
        # weights with the same scalars and the same kernel share a launch
        launches: dict[tuple[Any, ...], list[Operands]] = {}
        for o in operands:
            values = scalars(group, o.steps, o.update.rule)
            if projection.by_triton(o.update.dense, o.update.pattern):
                key = (*values, o.frozen, o.update.rule.kind, o.update.dense.device)
                launches.setdefault(key, []).append(o)
            else:
                cpu.step_adam(o, values)
        for (*values, frozen, kind, device), members in launches.items():
            self._kernel(kind, device).step(members, values, frozen)

    def _kernel(self, kind: tuple[bool, ...], device: torch.device) -> FusedAdam:
        from nmrun.kernels.triton_adamw import FusedAdam  # here: Triton is not everywhere

        if (kind, device) not in self._kernels:
            self._kernels[kind, device] = FusedAdam(kind, device)
        return self._kernels[kind, device]


def supports(o: Operands, fused: bool) -> bool:
    """Whether a kernel does this step: float32 tensors stored alike, on the CPU only for ``fused``
    optimizers, whose bits it has. A fixed mask is then all that the projection is made of, and
    bool."""
    dense, rule = o.update.dense, o.update.rule
    beside_mask = rule.pruned_weight_factor or rule.soft_threshold_scale is not None
    if rule.soft_threshold_gamma:
        return False
    if rule.mask is not None and (beside_mask or rule.mask.dtype != torch.bool):
        return False
    by_triton = projection.by_triton(dense, o.update.pattern)
    if not by_triton and not (fused and dense.is_cpu):
        return False
    scale, mask = rule.soft_threshold_scale, rule.mask
    numbers = [*o.all, *([] if scale is None else [scale])]
    shaped = [*o.all, *([] if mask is None else [mask])]
    if any(t.dtype != torch.float32 for t in numbers) or not stored_alike(*shaped):
        return False
    if any(t.data_ptr() % 16 or t.device != dense.device for t in [*shaped, *numbers]):
        return False
    return by_triton or cpu.takes_step(o)
