"""AutoSwitch: when Adam's second moment has settled enough to be frozen (arXiv 2302.01172,
algorithm 2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nmrun.registry import did_you_mean

RULES = ("auto", "auto_geometric")


class AutoSwitch:
    """Decides after which optimizer step t (counted from 1) phase two begins.

    ``rule="auto"`` samples ``Z_t = mean |v_t - v_{t-1}|`` over the sparse weights,
    ``"auto_geometric"`` the geometric mean over the non-zero changes. It fires when the mean of the
    last ``round(1 / (1 - beta2))`` samples, all of them present, is below Adam's eps and t > t_min
    * T, or when t > t_max * T. A number in (0, 1) instead of a rule fires after exactly that
    fraction of the steps. The threshold is not scale-free: with gradients of rms above 3e-3 only
    t_max can fire. On a GPU the mean is read one step late, so that no step waits for the device;
    there the threshold fires a step later than on a CPU.
    """

    def __init__(self, rule: str | float, t_min: float, t_max: float, total_steps: int) -> None:
        if not 0 <= t_min <= t_max <= 1:
            raise ValueError(
                f"step: t_min={t_min}, t_max={t_max} must be fractions of all steps with 0 <= t_min <= t_max <= 1"
            )
        self.automatic = rule in RULES
        self.geometric = rule == "auto_geometric"
        if not self.automatic:
            try:
                fraction = float(rule)
            except (TypeError, ValueError):
                hint = did_you_mean(str(rule), RULES)
                raise ValueError(
                    f"step: switch={rule!r} is neither auto, auto_geometric nor a fraction in (0, 1){hint}"
                ) from None
            if not 0 < fraction < 1:
                raise ValueError(
                    f"step: switch={rule} must be a fraction of all steps between 0 and 1, both excluded"
                )
            t_min = t_max = fraction
        self.first, self.last = round(t_min * total_steps), round(t_max * total_steps)
        self.samples = 0
        self.window = torch.zeros(0, dtype=torch.float64)
        self.eps = math.nan
        self.waits = True
        # the mean of the last step, on its way to the host
        self.underway: tuple[Tensor, torch.Event | None] | None = None

    def prepare(self, beta2: float, eps: float, device: torch.device) -> list[str]:
        """Size the window for this optimizer; returns what the user should know beforehand."""
        self.eps = float(eps)
        # round, since 1 / (1 - 0.999) is 999.99...
        self.window = torch.zeros(
            max(1, round(1 / (1 - float(beta2)))), dtype=torch.float64, device=device
        )
        self.waits = device.type == "cpu"
        if self.automatic and len(self.window) > self.last:
            return [
                f"STEP: AutoSwitch's window of {len(self.window)} steps is longer than t_max, step {self.last}: "
                "t_max will decide (a smaller beta2 shortens the window)"
            ]
        return []

    def sample(self, total: Tensor, logs: Tensor, nonzero: Tensor, count: int) -> None:
        """Take in one step's ``nmrun.optim.Adam.second_moment_change``. Stays on the device."""
        if not count:
            return
        z = (logs / nonzero).exp().nan_to_num(0.0) if self.geometric else total / count
        self.window[self.samples % len(self.window)] = z
        self.samples += 1

    def fires(self, step: int) -> str:
        """The reason why phase two begins after this step, or an empty string."""
        if not self.automatic:
            return f"fixed switch point, {self.last} steps" if step >= self.last else ""
        if step > self.last:
            return f"t > t_max = {self.last}; {self._state()}"
        # from t_min on, so that the mean of step t_min is known a step later
        if (
            self.samples >= len(self.window)
            and step >= self.first
            and self._known_mean() < self.eps
            and step > self.first
        ):
            return f"the variance has settled: {self._state()}"
        return ""

    def _known_mean(self) -> float:
        """The window's mean, the latest that can be had without waiting; inf before the first."""
        if self.waits:
            return float(self.window.mean())
        before, self.underway = self.underway, self._sent()
        if before is None:
            return math.inf
        mean, event = before
        if event is not None:
            event.synchronize()  # of the step before: it has passed, or is about to
        return float(mean)

    def _sent(self) -> tuple[Tensor, torch.Event | None]:
        mean = self.window.mean().to("cpu", non_blocking=True)
        event = None if self.window.device.type == "cpu" else torch.Event(self.window.device.type)
        if event is not None:
            event.record()
        return mean, event

    def _state(self) -> str:
        full = min(self.samples, len(self.window))
        mean = float(self.window.sum()) / max(1, full)
        return f"mean change {mean:.2g} over {full} of {len(self.window)} samples, threshold eps = {self.eps:.0e}"

    def metrics(self) -> dict[str, float]:
        """The last sample and the window's mean so far."""
        if not self.samples:
            return {}
        return {
            "step/variance_change": float(self.window[(self.samples - 1) % len(self.window)]),
            "step/variance_change_window": float(self.window.sum())
            / min(self.samples, len(self.window)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "window": self.window.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])
        self.window.copy_(state["window"])
        self.underway = (
            None
            if self.waits or self.samples < len(self.window)
            else (self.window.mean().cpu(), None)
        )
