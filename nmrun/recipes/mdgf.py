"""MdGf, mask decay gradient flow (Bambhaniya et al. 2024, arXiv 2402.04744): pruned weights fade out instead of vanishing.

Forward ``w * (m + (1 - m) * D(j))``, j the steps since the dense phase, the mask m chosen anew at every step; D falls linearly or
exponentially and is 0 in the final phase. The gradient is that of this product, so pruned weights receive less and less of it
(``grad_mode="scaled"``, the paper's idea); the authors' code passes it on unchanged (``"ste"``).
When to use: above 80 % sparsity. Cost: STE's, one pass over the sparse weights for the faded part and one for the gradient.
The products are dense until D is 0.
"""

from __future__ import annotations

from typing import ClassVar

from nmrun.patterns import Pattern
from nmrun.recipes import progressive
from nmrun.recipes.progressive import GRAD_MODES, Progressive


class MdGfLinear(Progressive):
    """``D(j) = max(0, 1 - tau j)``.

    ``tau``: per step; None (default) spreads the decay over the middle phase. ``dense``, ``final``: see :class:`Progressive`; the
    defaults are ours, the paper's differ by model. ``grad_mode``: ``"scaled"`` or ``"ste"``.
    """

    name: ClassVar[str] = "mdgf_linear"
    decay = staticmethod(progressive.linear)

    def __init__(
        self, pattern: Pattern, total_steps: int | None = None, *, tau: float | None = None, dense: float = 0.1,
        final: float = 0.2, grad_mode: str = "scaled",
    ) -> None:  # fmt: skip
        super().__init__(pattern, total_steps, dense, final)
        if tau is not None and not tau > 0:
            raise ValueError(f"{self.name}: tau={tau} must be above 0, or None to fit the run")
        if grad_mode not in GRAD_MODES:
            raise ValueError(f"{self.name}: grad_mode={grad_mode!r}; allowed are {', '.join(GRAD_MODES)}")
        self.tau, self.grad_mode = tau, grad_mode

    def factor(self) -> float:
        return 0.0 if self.step >= self.ends else self.decay(self.tau, self.length, max(0, self.step - self.begins))

    def metrics(self) -> dict[str, float]:
        return {f"{self.name}/factor": self.factor()}


class MdGfExponential(MdGfLinear):
    """``D(j) = exp(-tau j)``; the rest as in :class:`MdGfLinear`."""

    name: ClassVar[str] = "mdgf_exponential"
    decay = staticmethod(progressive.exponential)
