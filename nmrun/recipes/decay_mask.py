"""Decaying pruning mask (Kao et al. 2022, arXiv 2209.07617), the predecessor of MdGf and SdGf, with its straight-through gradient.

``kind``: ``"mask"`` fades pruned weights out linearly (``"mask_exponential"`` exponentially), and, unlike MdGf, passes the gradient on
unchanged; ``"structure"`` tightens the pattern stepwise (``"structure_geometric"`` in groups that shrink).
When to use: to compare with the paper; a Transformer for translation there. Cost: MdGf's or SdGf's.
"""

from __future__ import annotations

from typing import ClassVar

from nmrun import patterns
from nmrun.patterns import Pattern
from nmrun.recipes import progressive
from nmrun.recipes.progressive import Progressive

KINDS = ("mask", "mask_exponential", "structure", "structure_geometric")


class DecayMask(Progressive):
    """``kind``: as above. ``tau``: per step, for the mask kinds; None (default) fits the run. ``dense``, ``final``: see :class:`Progressive`."""

    name: ClassVar[str] = "decay_mask"

    def __init__(
        self, pattern: Pattern, total_steps: int | None = None, *, kind: str = "mask", tau: float | None = None,
        dense: float = 0.1, final: float = 0.2,
    ) -> None:  # fmt: skip
        super().__init__(pattern, total_steps, dense, final)
        if kind not in KINDS:
            raise ValueError(f"decay_mask: kind={kind!r}; allowed are {', '.join(KINDS)}")
        if tau is not None and not (tau > 0 and kind.startswith("mask")):
            raise ValueError(f"decay_mask: tau={tau} must be above 0, and is for the kinds mask and mask_exponential")
        self.kind, self.tau = kind, tau

    def factor(self) -> float:
        if not self.kind.startswith("mask") or self.step >= self.ends:
            return 0.0
        decay = progressive.linear if self.kind == "mask" else progressive.exponential
        return decay(self.tau, self.length, max(0, self.step - self.begins))

    def frames(self, target: Pattern) -> list[Pattern]:
        if self.kind == "structure":
            return patterns.stepwise(target)
        return patterns.geometric(target, 4) if self.kind == "structure_geometric" else [target]
