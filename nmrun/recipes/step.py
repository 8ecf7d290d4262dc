"""STEP: learn N:M masks with Adam from a precondition (Lu et al. 2023, arXiv 2302.01172).

Phase one is ordinary dense Adam. At the switch its second moment v is frozen. Phase two learns the
mask with STE, divides by the frozen preconditioner, and leaves all other parameters on live Adam.
The switch is found by a rule (:mod:`nmrun.recipes.switch`; the paper's is AutoSwitch, algorithm 2)
or fixed beforehand.

Cost: phase one is dense plus one pass over the sparse weights for the rule's sample; phase two is
STE's, and v needs no update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from nmrun.errors import ConfigError
from nmrun.optim.adam import Adam, check_freezable
from nmrun.patterns import Pattern
from nmrun.ranges import FLAG, SWITCH, among, number, one_of
from nmrun.recipes.base import Recipe
from nmrun.recipes.switch import switch_of
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class STEP(Recipe):
    """Dense training under Adam, then STE with Adam's second moment frozen.

    When to use: images under Adam, with ``switch=0.5``, where nothing can be tuned and the number of
    steps is given. With as many multiplications SR-STE catches up or leads. Where every recipe is tuned
    others lead, on text by far. In long runs on text and in translation it needs SR-STE's decay,
    ``decay=2e-4``. Fine-tuning at 2:4 for three epochs, seen on CoLA alone.

    Args:
        switch: when phase two, that of masks, begins: after a fraction of all steps, or by a rule:
            ``auto`` (AutoSwitch), ``auto_geometric``, ``variance_ratio`` or ``gradient_norm``
            (:mod:`nmrun.recipes.switch`).
        t_min: the fraction of all steps before which no rule switches.
        t_max: the fraction of all steps after which a rule switches in any case.
        window: whether AutoSwitch waits until its window of 1 / (1 - beta2) steps is ``full``, or
            takes the samples that there are (``partial``).
        threshold: AutoSwitch's threshold, over the change of the second moment that steady
            gradients make: above 1, such as 1.2. By default it is Adam's eps, as in the paper.
        eps_mode: the denominator of the frozen second moment v: ``inside`` is sqrt(v + eps),
            ``outside`` Adam's sqrt(v) + eps, ``floor`` sqrt(v) + eps^(3/4).
        bias_correction: whether the frozen second moment is bias-corrected.
        second_moment: ``frozen`` at the switch, or ``live``: phase two is then STE after a dense start,
            which shows what the freezing is worth.
        decay: the decay of pruned weights in phase two, as SR-STE's (the paper: 0).
        lr_factor: factor of the learning rates in phase two (the paper: 1). Phase two often trains
            best at more than the dense phase stands.
    """

    name: ClassVar[str] = "step"
    title: ClassVar[str] = "STEP"
    needs_total_steps: ClassVar[str] = "its switch lies between two fractions of the run"
    masks_are_largest: ClassVar[bool] = True

    switch: Annotated[str | float, SWITCH, among("auto", 0.1, 0.2, 0.3, 0.5, 0.7)] = "auto"
    t_min: Annotated[float, number(0, 1)] = 0.1
    t_max: Annotated[float, number(0, 1)] = 0.5
    window: Annotated[str, one_of("full", "partial")] = "full"
    threshold: Annotated[float | None, number(0, open_low=True, optional=True)] = None
    eps_mode: Annotated[str, one_of("inside", "outside", "floor")] = "inside"
    bias_correction: Annotated[bool, FLAG] = True
    second_moment: Annotated[str, one_of("frozen", "live")] = "frozen"
    decay: Annotated[float, number(0)] = 0.0
    lr_factor: Annotated[float, number(0, open_low=True)] = 1.0

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        assert total_steps is not None
        self.switching = switch_of(
            self.switch, self.window, self.threshold, self.t_min, self.t_max, total_steps
        )
        # rules fire after t_max
        self.dense_steps = max(1, self.switching.last + int(self.switching.automatic))
        self.dense_forward = True
        self._rates: list[Any] = []  # the groups' own, while a step takes place at others

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        adam = freezable(optimizer)
        groups = adam.groups_of([w.parameter for w in weights])
        if self.second_moment == "frozen":
            check_freezable(groups)
        differ = len({(g["betas"][1], g["eps"]) for g in groups}) > 1
        if differ and self.switching.automatic:
            raise ConfigError(
                "step: the parameter groups with sparse weights must share beta2 and eps, the switch pools them"
            )
        if late := self.switching.prepare(groups[0]["betas"][1], weights[0].dense.device):
            self.say(late)

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        freezable(optimizer).unfreeze_second_moments(self.eps_mode, self.bias_correction)

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(pruned_gradient_decay=self.decay)

    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        if self.dense_forward and self.switching.automatic:
            self.switching.observe(weights, freezable(optimizer))
        self.clean(optimizer)  # where the last step failed half-way
        if not self.dense_forward and self.lr_factor != 1:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.lr_factor

    def clean(self, optimizer: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.clean(optimizer)
        if not self.dense_forward or not (by := self.switching.fires(self.step)):
            return
        adam, params = freezable(optimizer), [w.parameter for w in weights]
        if self.second_moment == "frozen":
            adam.freeze_second_moment(params, self.eps_mode, self.bias_correction)
        self.dense_forward = False
        does = "freezes" if self.second_moment == "frozen" else "keeps updating"
        rate = "" if self.lr_factor == 1 else f" at {self.lr_factor:g} times the learning rate"
        why = self.switching.reason(by, self.step)
        text = f"STEP {does} the second moment and learns masks{rate} ({why})"
        self.say(text, "switch", by=by)

    def metrics(self) -> dict[str, float]:
        if self.dense_forward:
            return {"step/phase": 1.0, **self.switching.metrics()}
        return {"step/phase": 2.0}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "autoswitch": self.switching.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.switching.load_state_dict(state["autoswitch"])


def freezable(optimizer: torch.optim.Optimizer) -> Adam:
    """The optimizer as one whose second moment can be frozen. Raises ConfigError for another one."""
    if isinstance(optimizer, Adam):
        return optimizer
    instead = "AdamW" if isinstance(optimizer, torch.optim.AdamW) else "Adam or nmrun.optim.AdamW"
    raise ConfigError(
        f"step freezes Adam's second moment, which {type(optimizer).__module__}.{type(optimizer).__name__} cannot: "
        f"use nmrun.optim.{instead}, a drop-in with the same arguments"
    )
