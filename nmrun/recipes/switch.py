"""When STEP's second phase begins: AutoSwitch, the two rules that the paper compares it with, and a
fixed point (Lu et al. 2023, arXiv 2302.01172)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.optim.adam import Adam, second_moment_change, second_moment_sum
from nmrun.sparsity.processes import global_sum
from nmrun.sparsity.weight import SparseWeight


class Switch:
    """Decides after which optimizer step t (counted from 1) phase two begins.

    A rule fires when what it measures has settled and t > t_min * T, or when t > t_max * T, of T
    steps. On a GPU the measure is read one step late, so that no step waits for the device; there a
    rule fires a step later. Raises ValueError for fractions out of order.
    """

    automatic: ClassVar[bool] = True

    def __init__(self, t_min: float, t_max: float, total_steps: int) -> None:
        if not 0 <= t_min <= t_max <= 1:
            raise ConfigError(
                f"step: t_min={t_min}, t_max={t_max} must be fractions of all steps with 0 <= t_min <= t_max <= 1"
            )
        # at the latest after the last step, so that the run ends N:M
        self.last = min(round(t_max * total_steps), total_steps - 1)
        self.first = min(round(t_min * total_steps), self.last)
        self.samples = 0
        self.window = torch.zeros(0, dtype=torch.float64)
        self.waits = True
        # the measure of the last step, on its way to the host
        self.pending: tuple[Tensor, torch.Event | None] | None = None

    # --- what a rule says -------------------------------------------------------------------------

    def length(self, beta2: float) -> int:
        return steps_of(beta2)

    def observe(self, weights: Sequence[SparseWeight], adam: Adam) -> None:
        """Take a sample, before the optimizer steps; stays on the device."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether there are enough samples to measure anything."""
        return self.samples >= len(self.window)

    def measure(self) -> Tensor:
        """What the rule goes by now, 0-dimensional, on the device."""
        raise NotImplementedError

    def has_settled(self, measure: float) -> bool:
        raise NotImplementedError

    def reading(self) -> str:
        """Measure and threshold in words, once there are enough samples."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        return {}

    # --- what follows from it ---------------------------------------------------------------------

    def prepare(self, beta2: float, device: torch.device) -> str:
        """Make room for this optimizer's samples; returns what the user should know beforehand, if
        anything."""
        self.window = torch.zeros(self.length(float(beta2)), dtype=torch.float64, device=device)
        self.waits = device.type == "cpu"
        return ""

    def keep(self, sample: Tensor) -> None:
        """Remember a sample, in the place of the oldest."""
        self.window[self.samples % len(self.window)] = sample
        self.samples += 1

    def fires(self, step: int) -> str:
        """What lets phase two begin after this step: the ``rule``, ``t_max``, or that the step is
        ``fixed``. Empty before."""
        if step > self.last:
            return "t_max"
        # from t_min on, so that the measure of step t_min is known a step later
        if self.ready and step >= self.first:
            measure = self._latest()
            if measure is not None and self.has_settled(measure) and step > self.first:
                return "rule"
        return ""

    def reason(self, by: str, step: int) -> str:
        """What :meth:`fires` told after this step, in words."""
        if by == "t_max":
            measured = f"; {self.reading()}" if self.ready else ""
            return f"t > t_max = {self.last}{measured}"
        at_once = f"t > t_min = {self.first}, " if step == self.first + 1 else ""
        return f"{at_once}the variance has settled: {self.reading()}"

    def _latest(self) -> float | None:
        """The latest measure that can be had without waiting; None before the first."""
        if self.waits:
            return float(self.measure())
        before, self.pending = self.pending, self._copied_to_cpu()
        if before is None:
            return None
        measure, event = before
        if event is not None:
            event.synchronize()  # it was recorded a step ago, so this waits little or not at all
        return float(measure)

    def _copied_to_cpu(self) -> tuple[Tensor, torch.Event | None]:
        measure = self.measure().to("cpu", non_blocking=True)
        event = None if self.window.device.type == "cpu" else torch.Event(self.window.device.type)
        if event is not None:
            event.record()
        return measure, event

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "window": self.window.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])
        # as long as the loaded beta2 says
        self.window = state["window"].to(self.window, copy=True)
        self.pending = None if self.waits or not self.ready else (self.measure().cpu(), None)


class Fixed(Switch):
    """After a fixed fraction of the steps."""

    automatic: ClassVar[bool] = False

    def __init__(self, fraction: float, total_steps: int) -> None:
        super().__init__(fraction, fraction, total_steps)

    def fires(self, step: int) -> str:
        return "fixed" if step >= self.last else ""

    def reason(self, by: str, step: int) -> str:
        return f"fixed switch point, {self.last} steps"


def steps_of(beta2: float) -> int:
    """``1 / (1 - beta2)``: over how many steps Adam's second moment averages."""
    return max(1, round(1 / (1 - beta2)))  # round, since 1 / (1 - 0.999) is 999.99...


class AutoSwitch(Switch):
    """The paper's rule: when Adam's second moment has settled enough to be frozen (algorithm 2).

    With v_t Adam's second moment and d the number of sparse weights::

        arithmetic   Z_t = (1/d) sum_i |v_t,i - v_t-1,i|
        geometric    Z_t = exp((1/d) sum_i log |v_t,i - v_t-1,i|), over the changes that are not 0
        settled      mean of the last 1 / (1 - beta2) samples Z < eps

    eps is Adam's. That threshold is not scale-free: with gradients of rms above 3e-3 it is never
    reached, below 1e-3 it always is (at beta2 = 0.999). A relative one, ours, is instead::

        settled      mean of the last samples Z < threshold * (1 - beta2) * mean_i v_t,i

    which the loss's scale leaves alone. At first v is smaller than it will be, so that the quotient
    begins at ``1 / (1 - beta2)``; steady gradients bring it to about 1, growing ones keep it above.

    Args:
        partial: average over the samples that there are, as the code at huyz2023/2by4-pretrain
            does; else all of the window have to be there. The paper's text does not say which (as
            far as we know).
        threshold: the relative one (above 1, say 1.2); None: Adam's eps, as in the paper.
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

    @property
    def ready(self) -> bool:
        return self.samples >= (1 if self.partial else len(self.window))

    def prepare(self, beta2: float, device: torch.device) -> str:
        super().prepare(beta2, device)
        if self.partial or len(self.window) <= self.last:
            return ""
        return (
            f"STEP switches at step {self.last + 1} (t_max), before AutoSwitch's window of "
            f"{len(self.window):,} steps is full"
        )

    def observe(self, weights: Sequence[SparseWeight], adam: Adam) -> None:
        parameters = [weight.parameter for weight in weights]
        group = adam.groups_of(parameters)[0]  # a loaded one may have another eps
        self.eps, rest = float(group["eps"]), 1 - float(group["betas"][1])
        with_gradient = [weight for weight in weights if weight.grad is not None]
        count = sum(weight.shape.numel() for weight in with_gradient)
        if not count:
            return

        def change(part: Sequence[SparseWeight]) -> Tensor:
            own = [weight.parameter for weight in part]
            return second_moment_change(adam, own, logs=self.geometric)

        total, *of_logs = global_sum(weights, change).unbind()
        if self.geometric:
            logs, nonzero = of_logs
            self.keep((logs / nonzero).exp().nan_to_num(0.0))
        else:
            self.keep(total / count)
        if self.threshold is not None:
            total = global_sum(with_gradient, lambda part: _second_moment(part, adam))
            self.size = rest * total / count

    def measure(self) -> Tensor:
        mean = self.window[: self.samples].mean()
        return mean if self.threshold is None else mean / self.size

    def has_settled(self, measure: float) -> bool:
        return measure < (self.eps if self.threshold is None else self.threshold)

    def reading(self) -> str:
        full, mean = min(self.samples, len(self.window)), self._mean()
        text = f"mean change {mean:.2g} over {full} of {len(self.window)} samples, threshold "
        if self.threshold is None:
            return f"{text}eps = {self.eps:.0e}"
        return f"{text}{self.threshold:g} times {float(self.size):.2g}, that of steady gradients"

    def metrics(self) -> dict[str, float]:
        """The last sample and the window's mean so far, and the relative one where that counts."""
        if not self.samples:
            return {}
        scalars = {
            "step/variance_change": float(self.window[(self.samples - 1) % len(self.window)]),
            "step/variance_change_window": self._mean(),
        }
        if self.threshold is not None and self.size:  # 0 where all gradients were
            scalars["step/variance_change_relative"] = self._mean() / float(self.size)
        return scalars

    def _mean(self) -> float:
        return float(self.window.sum()) / max(1, min(self.samples, len(self.window)))

    def state_dict(self) -> dict[str, Any]:
        size = {} if self.threshold is None else {"size": self.size.clone()}
        return {**super().state_dict(), **size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "size" in state:
            self.size = state["size"].to(self.window.device)
        super().load_state_dict(state)


class NormSwitch(Switch):
    """A rule by a norm now and D = 1 / (1 - beta2) steps ago; the window holds those between, too."""

    what: ClassVar[str]
    key: ClassVar[str]
    threshold: ClassVar[float]

    def length(self, beta2: float) -> int:
        return steps_of(beta2) + 1

    def norms(self) -> tuple[Tensor, Tensor]:
        """The norm of step t - D, and that of step t."""
        size = len(self.window)
        return self.window[self.samples % size], self.window[(self.samples - 1) % size]

    def reading(self) -> str:
        return f"{self.what} {float(self.measure()):.3g}, threshold {self.threshold}"

    def metrics(self) -> dict[str, float]:
        return {self.key: float(self.measure())} if self.ready else {}


class VarianceRatio(NormSwitch):
    """A switch by the norm of Adam's second moment, after 1-bit Adam (Tang et al. 2021, arXiv
    2102.02888)::

        settled   ||v_t-D||_1 / ||v_t||_1 > 0.96,   D = 1 / (1 - beta2)

    It looks at the sum over all weights alone: changes that cancel out are not seen, and a falling
    variance counts as settled. Form and constant are as they are commonly reported; the paper's own
    run of this rule could not be looked up.
    """

    what, key, threshold = "ratio of variances", "step/variance_ratio", 0.96

    def observe(self, weights: Sequence[SparseWeight], adam: Adam) -> None:
        self.keep(global_sum(weights, lambda part: _second_moment(part, adam)))

    def measure(self) -> Tensor:
        before, now = self.norms()
        return before / now

    def has_settled(self, measure: float) -> bool:
        return measure > self.threshold


class GradientNorm(NormSwitch):
    """A switch by the norm of the gradient, after Accordion (Agarwal et al. 2021, arXiv
    2010.16248)::

        settled   | ||g_t-D|| - ||g_t|| | / ||g_t-D|| < 0.5,   D = 1 / (1 - beta2)

    Condition and constant are those of its code (uw-mad-dash/Accordion). That compares, layer by
    layer, gradients added up over an epoch with those ten epochs before. Here the norm is over all
    sparse weights, of single steps, D apart: STEP's own form could not be looked up.
    """

    what, key, threshold = "change of the gradient's norm", "step/gradient_norm_change", 0.5

    def observe(self, weights: Sequence[SparseWeight], adam: Adam) -> None:
        def squares(part: Sequence[SparseWeight]) -> Tensor:
            return torch.stack(
                [w.grad.double().square().sum() for w in part if w.grad is not None]
            ).sum()

        if with_gradient := [weight for weight in weights if weight.grad is not None]:
            self.keep(global_sum(with_gradient, squares).sqrt())

    def measure(self) -> Tensor:
        before, now = self.norms()
        return (before - now).abs() / before

    def has_settled(self, measure: float) -> bool:
        return measure < self.threshold


def _second_moment(weights: Sequence[SparseWeight], adam: Adam) -> Tensor:
    return second_moment_sum(adam, [weight.parameter for weight in weights])


OF_AUTOSWITCH = ("auto", "auto_geometric")
OTHERS = {"variance_ratio": VarianceRatio, "gradient_norm": GradientNorm}


def switch_of(
    rule: str | float,
    window: str,
    threshold: float | None,
    t_min: float,
    t_max: float,
    total_steps: int,
) -> Switch:
    """The switch of a run. ``rule``: a name, or the fraction of all steps at which to switch.
    Raises ValueError for options that it does not have."""
    if rule in OF_AUTOSWITCH:
        geometric, partial = rule == "auto_geometric", window == "partial"
        return AutoSwitch(geometric, partial, threshold, t_min, t_max, total_steps)
    if window != "full" or threshold is not None:
        raise ConfigError(
            f"step: window and threshold are of switch=auto and auto_geometric, not of switch={rule}"
        )
    if rule in OTHERS:
        return OTHERS[str(rule)](t_min, t_max, total_steps)
    return Fixed(float(rule), total_steps)
