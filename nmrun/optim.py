"""Adam and AdamW whose second moment can be frozen, and learning-rate schedules as pure functions
of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nmrun.kernels.adam import OnePass
from nmrun.kernels.layout import local
from nmrun.kernels.operands import Update, decoupled
from nmrun.ranks import part_like

EPS_MODES = ("inside", "outside", "floor")


class Adam(torch.optim.Adam):
    """``torch.optim.Adam`` (coupled weight decay) with a second moment that can be frozen: STEP's
    preconditioner.

    Arguments, state and results are those of ``torch.optim.Adam`` until
    :meth:`freeze_second_moment` is called for some parameters; from then on those are divided by a
    constant, while the first moment, the bias correction of the first moment, weight decay and all
    other parameters go on as before. ``capturable`` and ``differentiable`` are refused then.
    """

    _one_pass: OnePass | None = None

    def plan(self, updates: Mapping[Any, Update]) -> list[Tensor]:
        """Let the next :meth:`step` carry out rules in the same pass as its own update.

        It does so (``nmrun.kernels.adam``) for float32 weights stored like their gradients, in a
        group without amsgrad, maximize, capturable and differentiable; on the CPU with
        ``fused=True``. The others it steps as ever.

        Args:
            updates: by parameter, what is moved, where the projection goes, and the rule. ``.grad``
                is not changed.

        Returns:
            The parameters for which it will.
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
                    state = self._started(group, p)
                    self._one_pass.plan(group, p, state, updates[p])
        return list(self._one_pass.pending)

    @torch.no_grad()
    def freeze_second_moment(
        self, params: Iterable[Tensor], eps_mode: str = "inside", bias_correction: bool = True
    ) -> None:
        """Replace the second moment v of ``params`` by the constant denominator of STEP's second
        phase (arXiv 2302.01172).

        ``v*`` is v (the running maximum under amsgrad), divided by ``1 - beta2^t`` with
        ``bias_correction``, so that the step size does not jump at the switch. The denominator is
        ``sqrt(v* + eps)`` for ``eps_mode="inside"`` (a coordinate with v* = 0 then moves by at most
        ``lr * |m| / sqrt(eps)``), ``sqrt(v*) + eps`` for ``"outside"`` (Adam's own form; dead
        coordinates explode), ``sqrt(v*) + eps^(3/4)`` for ``"floor"``. Kept as
        ``state[p]["frozen_denominator"]`` in place of v, so it travels in ``state_dict()`` and
        costs no memory. Parameters without state yet have v* = 0.
        """
        if eps_mode not in EPS_MODES:
            raise ValueError(f"eps_mode={eps_mode!r}: allowed are {', '.join(EPS_MODES)}")
        wanted = {id(p): p for p in params}
        groups = self.groups_of(wanted.values())
        if any(group["capturable"] or group["differentiable"] for group in groups):
            raise ValueError(
                "a frozen second moment works with neither capturable=True nor differentiable=True"
            )
        for group in groups:
            for p in group["params"]:
                if id(p) not in wanted or "frozen_denominator" in self.state[p]:
                    continue
                state = self._started(group, p)
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

    def _started(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """The state of a parameter, made as torch makes it before its first step."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=p.device if group["fused"] else None
            )
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    def groups_of(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """The parameter groups that hold any of ``params``."""
        wanted = {id(p) for p in params}
        return [
            group for group in self.param_groups if wanted.intersection(map(id, group["params"]))
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step, as ``torch.optim.Adam.step``."""
        if skipped_by_loss_scaling(self):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done: list[tuple[Tensor, Tensor]] = []
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
            done += [(p, p.grad) for p in one_pass + frozen]
        for p, _ in done:
            p.grad = None  # the stock step passes over parameters without a gradient
        try:
            _stock_step(self)
        finally:
            for p, grad in done:
                p.grad = grad
        return loss

    def _frozen_step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = self._gradients(group, params)
        states = [self.state[p] for p in params]
        weights = [local(p.detach()) for p in params]
        moments = [local(s["exp_avg"]) for s in states]
        denominators = [local(s["frozen_denominator"]) for s in states]
        beta1, lr = group["betas"][0], float(group["lr"])
        for s in states:
            # a fused step kept it on the device, where reading it would wait
            s["step"] = s["step"].cpu() + 1
        if decoupled(group):
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(moments, grads, 1 - beta1)
        sizes = [-lr / (1 - beta1 ** float(s["step"])) for s in states]
        torch._foreach_addcdiv_(weights, moments, denominators, sizes)
        torch.autograd.graph.increment_version(params)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Adam.load_state_dict``."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            if "frozen_denominator" in state:
                # torch.distributed.checkpoint loads it whole, and leaves the moments of before
                state.pop("exp_avg_sq", None)
                state.pop("max_exp_avg_sq", None)
                state["frozen_denominator"] = part_like(state["frozen_denominator"], p)
        if self._one_pass is not None:
            self._one_pass.forget()

    @torch.no_grad()
    def second_moment_change(
        self, params: Iterable[Tensor], logs: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """How far v would move if :meth:`step` were called with the gradients as they are:
        AutoSwitch's sample.

        Returns ``(sum |dv|, sum of log |dv| over dv != 0, count of dv != 0, count)`` over all
        coordinates of those ``params`` that have a gradient; the first three are 0-dimensional
        float64 tensors on the gradients' device (no synchronisation). ``logs=False`` leaves the
        second and third at 0, which saves most of the time. ``dv = (1 - beta2) (g^2 - v)`` exactly,
        so no copy of the previous v is needed.
        """
        wanted = {id(p) for p in params}
        total: list[Tensor] = []
        log_sum: list[Tensor] = []
        nonzero: list[Tensor] = []
        count = 0
        for group in self.param_groups:
            chosen = [p for p in group["params"] if id(p) in wanted and p.grad is not None]
            if not chosen:
                continue
            rest = 1 - group["betas"][1]
            for p, grad in zip(chosen, self._gradients(group, chosen), strict=True):
                v = self.state.get(p, {}).get("exp_avg_sq")
                v = None if v is None else local(v)
                change = (
                    grad.square() if v is None else torch.addcmul(v, grad, grad, value=-1).abs_()
                )
                total.append(change.sum().double() * rest)
                if logs:
                    moved = change > 0
                    nonzero.append(moved.sum().double())
                    logs_of_moved = torch.where(moved, change, 1.0).log().sum(dtype=torch.float64)
                    log_sum.append(logs_of_moved + nonzero[-1] * math.log(rest))
                count += grad.numel()
        zero = torch.zeros((), dtype=torch.float64, device=total[0].device if total else None)
        sums = [torch.stack(parts).sum() if parts else zero for parts in (total, log_sum, nonzero)]
        return sums[0], sums[1], sums[2], count

    def _gradients(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """The gradients as Adam's moments see them: negated when maximising, with coupled weight
        decay added.
        """
        grads = [local(p.grad) for p in params if p.grad is not None]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if group["weight_decay"] and not decoupled(group):
            grads = list(
                torch._foreach_add(
                    grads, [local(p.detach()) for p in params], alpha=group["weight_decay"]
                )
            )
        return grads


class AdamW(Adam):
    """Drop-in ``torch.optim.AdamW`` (decoupled weight decay, default 1e-2) whose second moment can
    be frozen; see :class:`Adam`.
    """

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


def freezable(optimizer: torch.optim.Optimizer, recipe: str) -> Adam:
    """The optimizer, if its second moment can be frozen. Raises ValueError that says what to use
    instead.
    """
    if isinstance(optimizer, Adam):
        return optimizer
    own = "AdamW" if isinstance(optimizer, torch.optim.AdamW) else "Adam or nmrun.optim.AdamW"
    raise ValueError(
        f"{recipe} freezes Adam's second moment, which {type(optimizer).__module__}.{type(optimizer).__name__} cannot: "
        f"use nmrun.optim.{own}, a drop-in with the same arguments"
    )


def skipped_by_loss_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Settle what a GradScaler left to a fused optimizer: unscale the gradients here, and say
    whether the step is skipped.

    A GradScaler hands its scale and its overflow flag to optimizers that apply them in their fused
    kernel. Whoever edits gradients before that kernel must see them unscaled, and must not count a
    step that the overflow turns into nothing.
    """
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


def closure_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Evaluate a step's closure now, and hand its loss on: gradients are edited before the step."""
    closure = kwargs.get("closure")
    if closure is None:
        closure = next((a for a in args[1:] if callable(a)), None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    others = tuple(a for a in args[1:] if a is not closure)
    return (args[0], lambda: loss, *others), rest


def _stock_step(optimizer: Adam) -> None:
    """``torch.optim.Adam.step`` without the hooks, which torch wraps around the class once anyone
    makes a plain Adam.
    """
    step = torch.optim.Adam.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


def schedule_factor(
    name: str, warmup_steps: int, total_steps: int, final: float = 0.0
) -> Callable[[int], float]:
    """The learning rate as a fraction of its base value, a pure function of the step (0-based), so
    resuming needs no state.

    Linear warm-up over ``warmup_steps`` (the first step has ``1 / warmup_steps`` of the base), then
    ``constant``, ``linear`` or ``cosine`` from 1 down to ``final`` at step ``total_steps``.
    """
    if name not in ("constant", "linear", "cosine"):
        raise ValueError(f"schedule {name!r}: allowed are constant, linear, cosine")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        if name == "constant":
            return 1.0
        shape = 1.0 - done if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return final + (1.0 - final) * shape

    return factor


def inverse_sqrt_factor(warmup_steps: int, start: float = 0.0) -> Callable[[int], float]:
    """The schedule of the Transformer (Vaswani et al. 2017, equation 3) as fairseq has it, as a
    fraction of its highest value.

    It rises linearly from ``start`` at step 0 to 1 at step ``warmup_steps`` (1 or more), then it is
    ``sqrt(warmup_steps / step)``.
    """
    return lambda step: (
        start + (1.0 - start) * step / warmup_steps
        if step < warmup_steps
        else math.sqrt(warmup_steps / step)
    )


def scheduled(options: dict[str, Any], lr: float, total_steps: int) -> Callable[[int], float]:
    """The learning rate as a fraction of ``lr``, its base value, by the config's ``schedule``
    group.
    """
    if options["name"] == "inverse_sqrt":
        return inverse_sqrt_factor(options["warmup_steps"], options["init_lr"] / lr)
    return schedule_factor(
        options["name"], round(options["warmup"] * total_steps), total_steps, options["final"]
    )
