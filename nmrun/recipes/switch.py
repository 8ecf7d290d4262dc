"""When STEP's second phase begins: what all rules of the switch share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nmrun.optim import Adam
from nmrun.sparsity.weight import SparseWeight


class Switch:
    """Decides after which optimizer step t (counted from 1) phase two begins.

    A rule fires when what it measures has settled and t > t_min * T, or when t > t_max * T, with T
    steps in all. On a GPU the measure is read one step late, so that no step waits for the device;
    there a rule fires a step later than on a CPU.

    Args:
        t_min, t_max: fractions of all steps.
        total_steps: T.

    Raises:
        ValueError: for fractions out of order.
    """

    automatic: ClassVar[bool] = True

    def __init__(self, t_min: float, t_max: float, total_steps: int) -> None:
        if not 0 <= t_min <= t_max <= 1:
            raise ValueError(
                f"step: t_min={t_min}, t_max={t_max} must be fractions of all steps with 0 <= t_min <= t_max <= 1"
            )
        self.first, self.last = round(t_min * total_steps), round(t_max * total_steps)
        self.samples = 0
        self.window = torch.zeros(0, dtype=torch.float64)
        self.waits = True
        # the measure of the last step, on its way to the host
        self.underway: tuple[Tensor, torch.Event | None] | None = None

    # --- what a rule says -------------------------------------------------------------------------

    def length(self, beta2: float) -> int:
        """How many samples are remembered."""
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
        """Whether a measure means that phase two may begin."""
        raise NotImplementedError

    def said(self) -> str:
        """Measure and threshold in words, once there are enough samples."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Scalars for the log."""
        raise NotImplementedError

    # --- what follows from it ---------------------------------------------------------------------

    def prepare(self, beta2: float, eps: float, device: torch.device) -> list[str]:
        """Make room for this optimizer's samples; returns what the user should know beforehand."""
        self.window = torch.zeros(self.length(float(beta2)), dtype=torch.float64, device=device)
        self.waits = device.type == "cpu"
        return []

    def keep(self, sample: Tensor) -> None:
        """Remember a sample, in the place of the oldest."""
        self.window[self.samples % len(self.window)] = sample
        self.samples += 1

    def fires(self, step: int) -> str:
        """The reason why phase two begins after this step, or an empty string."""
        if step > self.last:
            measured = f"; {self.said()}" if self.ready else ""
            return f"t > t_max = {self.last}{measured}"
        # from t_min on, so that the measure of step t_min is known a step later
        if self.ready and step >= self.first:
            measure = self._known()
            if measure is not None and self.has_settled(measure) and step > self.first:
                at_once = f"t > t_min = {self.first}, " if step == self.first + 1 else ""
                return f"{at_once}the variance has settled: {self.said()}"
        return ""

    def _known(self) -> float | None:
        """The latest measure that can be had without waiting; None before the first."""
        if self.waits:
            return float(self.measure())
        before, self.underway = self.underway, self._sent()
        if before is None:
            return None
        measure, event = before
        if event is not None:
            event.synchronize()  # of the step before: it has passed, or is about to
        return float(measure)

    def _sent(self) -> tuple[Tensor, torch.Event | None]:
        measure = self.measure().to("cpu", non_blocking=True)
        event = None if self.window.device.type == "cpu" else torch.Event(self.window.device.type)
        if event is not None:
            event.record()
        return measure, event

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "window": self.window.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])
        self.window.copy_(state["window"])
        self.underway = None if self.waits or not self.ready else (self.measure().cpu(), None)


class Fixed(Switch):
    """After a fixed fraction of the steps."""

    automatic: ClassVar[bool] = False

    def __init__(self, fraction: float, total_steps: int) -> None:
        super().__init__(fraction, fraction, total_steps)

    def fires(self, step: int) -> str:
        return f"fixed switch point, {self.last} steps" if step >= self.last else ""

    def metrics(self) -> dict[str, float]:
        return {}


def steps_of(beta2: float) -> int:
    """``1 / (1 - beta2)``: over how many steps Adam's second moment averages."""
    return max(1, round(1 / (1 - beta2)))  # round, since 1 / (1 - 0.999) is 999.99...
