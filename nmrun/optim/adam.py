"""Adam and AdamW whose second moment can be frozen and that carry out a rule in their own pass over a
weight: C on the CPU, Triton on CUDA devices.

Apart, SR-STE's decay, Adam and the projection move at least 52 bytes a weight through memory.
Adam alone moves 28, and all of it together 36.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.kernels import cpu, projection
from nmrun.kernels.layout import (
    Operands,
    Update,
    decoupled,
    local,
    part_like,
    scalars,
    stored_alike,
)
from nmrun.optim.stock import EagerOptimizer, breaks_graph, stock_step

if TYPE_CHECKING:
    from nmrun.kernels.triton_adamw import FusedAdam

EPS_MODES = ("inside", "outside", "floor")


class Adam(EagerOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` (coupled weight decay) whose second moment can be frozen.

    Arguments, state and results are those of ``torch.optim.Adam``, so it can take its place and load
    its state. :func:`nmrun.sparsify` uses what it adds: STEP freezes second moments, and with
    ``fused=True`` a kernel makes the step and the projection in one pass.
    """

    _one_pass: OnePass | None = None

    def plan(self, updates: Mapping[Any, Update]) -> list[Tensor]:
        """Let the next :meth:`step` carry out rules in the same pass as its own update.

        Kernels can do so for float32 weights that are stored like their gradients, on the CPU with
        ``fused=True``. Their group has none of amsgrad, maximize, capturable and differentiable,
        and no tensor as learning rate or beta.

        Args:
            updates: by parameter, its dense weight, the memory of the projection, and the rule.

        Returns:
            The parameters for which the step will do so.
        """
        self._one_pass = self._one_pass or OnePass()
        self._one_pass.pending = {}
        for group in self.param_groups:
            others = ("amsgrad", "maximize", "capturable", "differentiable")
            if any(group[option] for option in others):
                continue
            if any(isinstance(x, Tensor) for x in (group["lr"], *group["betas"])):
                continue
            for p in group["params"]:
                if p in updates and p.grad is not None:
                    state = self._adam_state(group, p)
                    self._one_pass.plan(group, p, state, updates[p])
        return list(self._one_pass.pending)

    @torch.no_grad()
    def freeze_second_moment(
        self, params: Iterable[Tensor], eps_mode: str = "inside", bias_correction: bool = True
    ) -> None:
        """Divide the updates of some parameters by a constant tensor from now on, made of their present
        second moment v: STEP's second phase (Lu et al. 2023, arXiv 2302.01172).

        The tensor takes the place of v in the state, as ``state[p]["frozen_denominator"]``. First
        moments, their bias correction, weight decay and all other parameters go on as before. Let
        ``v*`` be v, or its running maximum under amsgrad, and 0 for a parameter without state.
        Called again, it changes nothing.

        Args:
            params: parameters of this optimizer.
            eps_mode: the form of the tensor. ``"inside"``: ``sqrt(v* + eps)``, so a coordinate
                with v* = 0 moves by at most ``lr * |m| / sqrt(eps)``. ``"outside"``: ``sqrt(v*) +
                eps``, Adam's own form, with which coordinates of v* = 0 explode. ``"floor"``:
                ``sqrt(v*) + eps^(3/4)``.
            bias_correction: divide v* by ``1 - beta2^t``, so that the step size does not jump.

        Raises:
            ValueError: for another ``eps_mode``, and in a group that is capturable or
                differentiable.
        """
        if eps_mode not in EPS_MODES:
            raise ValueError(f"eps_mode={eps_mode!r}: allowed are {', '.join(EPS_MODES)}")
        by_id = {id(p): p for p in params}
        groups = self.groups_of(by_id.values())
        check_freezable(groups)
        for group in groups:
            for p in group["params"]:
                if id(p) not in by_id or "frozen_denominator" in self.state[p]:
                    continue
                state = self._adam_state(group, p)
                v = state.pop("exp_avg_sq")
                v = state.pop("max_exp_avg_sq", v)
                if bias_correction and (steps := float(state["step"])) > 0:
                    v = v / (1 - group["betas"][1] ** steps)
                eps = group["eps"]
                if eps_mode == "inside":
                    state["frozen_denominator"] = (v + eps).sqrt()
                else:
                    state["frozen_denominator"] = v.sqrt().add_(
                        eps if eps_mode == "outside" else eps**0.75
                    )

    @torch.no_grad()
    def unfreeze_second_moments(
        self, eps_mode: str = "inside", bias_correction: bool = True
    ) -> None:
        """Undo :meth:`freeze_second_moment` for all parameters: their second moments go on from the
        values at which they were frozen. Both arguments have to be those of the freezing."""
        for group in self.param_groups:
            eps, beta2 = group["eps"], group["betas"][1]
            for p in group["params"]:
                state = self.state.get(p, {})
                if "frozen_denominator" not in state:
                    continue
                v = state.pop("frozen_denominator")
                values = local(v)  # DTensor knows no clamping in place
                if eps_mode == "inside":
                    values.square_().sub_(eps).clamp_min_(0.0)
                else:
                    shift = eps if eps_mode == "outside" else eps**0.75
                    values.sub_(shift).clamp_min_(0.0).square_()
                if bias_correction:
                    values.mul_(1 - beta2 ** float(state["step"]))
                state["exp_avg_sq"] = v
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = v.clone()
                if group["fused"]:  # torch counts there
                    state["step"] = state["step"].to(p.device)
        if self._one_pass is not None:
            self._one_pass.forget()

    def _adam_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """The state of a parameter, made as torch makes it if there is none."""
        state = self.state[p]
        if "exp_avg" not in state:
            state.update(first_state(group, p))
        return state

    def groups_of(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """The parameter groups that have at least one of these parameters."""
        ids = {id(p) for p in params}
        return [group for group in self.param_groups if ids.intersection(map(id, group["params"]))]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, as ``torch.optim.Adam.step`` does, and return the closure's loss."""
        if skipped_by_loss_scaling(self):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads: list[tuple[Tensor, Tensor]] = []
        if self._one_pass is not None:
            self._one_pass.begin()
        for group in self.param_groups:
            one_pass = self._one_pass.step(group, self.state) if self._one_pass else []
            stepped = set(map(id, one_pass))
            frozen = [
                p
                for p in group["params"]
                if p.grad is not None
                and id(p) not in stepped
                and "frozen_denominator" in self.state.get(p, ())
            ]
            if frozen:
                self._frozen_step(group, frozen)
            grads += [(p, p.grad) for p in one_pass + frozen]
        for p, _ in grads:
            p.grad = None  # the stock step passes over parameters without a gradient
        try:
            stock_step(self, torch.optim.Adam)
        finally:
            for p, grad in grads:
                p.grad = grad
        return loss

    def _frozen_step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = gradients(group, params)
        states = [self.state[p] for p in params]
        weights = [local(p.detach()) for p in params]
        moments = [local(s["exp_avg"]) for s in states]
        denominators = [local(s["frozen_denominator"]) for s in states]
        beta1, lr = group["betas"][0], float(group["lr"])
        for s in states:
            # a fused step counts on the device; reading the count there would wait at each step
            s["step"] = s["step"].cpu() + 1
        if decoupled(group):
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(moments, grads, 1 - beta1)
        sizes = [-lr / (1 - beta1 ** float(s["step"])) for s in states]
        torch._foreach_addcdiv_(weights, moments, denominators, sizes)
        torch.autograd.graph.increment_version(params)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an Adam, with or without frozen second moments."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            if "frozen_denominator" in state:
                # torch.distributed.checkpoint loads it whole, and leaves earlier second moments
                state.pop("exp_avg_sq", None)
                state.pop("max_exp_avg_sq", None)
                state["frozen_denominator"] = part_like(state["frozen_denominator"], p)
        if self._one_pass is not None:
            self._one_pass.forget()


class AdamW(Adam):
    """``torch.optim.AdamW`` (decoupled weight decay, 1e-2 by default) with the methods of
    :class:`Adam`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **kwargs
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # states of an Adam and of older AdamWs say otherwise
            group["decoupled_weight_decay"] = True


def check_freezable(groups: Iterable[dict[str, Any]]) -> None:
    """Raise ConfigError for a group whose second moments cannot be frozen."""
    if any(group["capturable"] or group["differentiable"] for group in groups):
        raise ConfigError(
            "a frozen second moment works with neither capturable=True nor differentiable=True"
        )


def first_state(group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
    """Adam's state of a parameter before its first step, as torch makes it."""
    moments = ["exp_avg", "exp_avg_sq"]
    if group["amsgrad"]:
        moments.append("max_exp_avg_sq")
    on_device = group.get("fused") or group.get("capturable")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device if on_device else None),
        **{key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in moments},
    }


def gradients(group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
    """The gradients of parameters that have one, as Adam's moments see them: with the sign and
    coupled weight decay. Of a sharded one it is this process's part."""
    grads = [local(p.grad) for p in params if p.grad is not None]
    if not grads:  # torch's foreach functions take no empty lists
        return []
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if group["weight_decay"] and not decoupled(group):
        grads = list(
            torch._foreach_add(
                grads, [local(p.detach()) for p in params], alpha=group["weight_decay"]
            )
        )
    return grads


@torch.no_grad()
def second_moment_change(adam: Adam, params: Iterable[Tensor], logs: bool = True) -> Tensor:
    """AutoSwitch's sample: how far the next step would move the second moment, over all
    coordinates. For step t, ``v_t = beta2 v_(t-1) + (1 - beta2) g^2`` (Kingma and Ba 2015). So
    ``dv = (1 - beta2) (g^2 - v)`` is known from the gradients, without a copy of v. Returns
    ``sum |dv|``; with ``logs``, which take most of the time, also ``sum log |dv|`` and the number of
    coordinates, both where dv is not 0. (1,) or (3,), float64, on the device."""
    ids, rows = {id(p) for p in params}, []
    for group in adam.param_groups:
        parameters = [p for p in group["params"] if id(p) in ids and p.grad is not None]
        rest = 1 - group["betas"][1]
        for p, grad in zip(parameters, gradients(group, parameters), strict=True):
            v = adam.state.get(p, {}).get("exp_avg_sq")
            far = (
                grad.square() if v is None else torch.addcmul(local(v), grad, grad, value=-1).abs_()
            )
            row = [far.sum().double() * rest]
            if logs:
                moved = far > 0
                count = moved.sum().double()
                log_sum = torch.where(moved, far, 1.0).log().sum(dtype=torch.float64)
                row += [log_sum + count * math.log(rest), count]
            rows.append(row)
    if not rows:
        return torch.zeros(3 if logs else 1, dtype=torch.float64)
    return torch.stack([torch.stack(column).sum() for column in zip(*rows, strict=True)])


def second_moment_sum(adam: Adam, params: Iterable[Tensor]) -> Tensor:
    """The sum of the second moment as the next step would leave it: 0-dimensional, float64, on the
    device. Parameters without a gradient keep theirs."""
    ids, sums = {id(p) for p in params}, []
    for group in adam.param_groups:
        parameters = [p for p in group["params"] if id(p) in ids]
        beta2 = group["betas"][1]
        stepped = [p for p in parameters if p.grad is not None]
        for p in parameters:
            if (v := adam.state.get(p, {}).get("exp_avg_sq")) is not None:
                sums.append(local(v).sum().double() * (1.0 if p.grad is None else beta2))
        for grad in gradients(group, stepped):
            sums.append(grad.square().sum().double() * (1 - beta2))
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def skipped_by_loss_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Unscale the gradients where a GradScaler left that to the optimizer; whether they overflowed,
    so that the step is skipped. A GradScaler gives its scale and its overflow flag to optimizers
    whose fused kernel applies them. A recipe edits gradients before this kernel."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        return True
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        torch._foreach_div_(grads, float(scale))
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    return False


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
