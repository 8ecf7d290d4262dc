"""What a recipe is: two functions and a clock.

``project`` maps the dense weight to the weight that the forward pass uses, ``edit_gradient`` changes the dense gradient once per
optimizer step (after unscaling and clipping), and ``step`` with ``total_steps`` tells which phase the run is in. The gradient of
the projected weight reaches the dense weight unchanged (straight-through). A new recipe overrides what differs from plain STE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nmrun.kernels import cpu
from nmrun.patterns import Pattern
from nmrun.sparsity import masks

if TYPE_CHECKING:
    from nmrun.sparsity.attach import Projection, SparseWeight


class Recipe:
    """Base of all recipes; by itself the hard-threshold straight-through estimator.

    ``pattern`` is the target, ``total_steps`` the number of optimizer steps of the whole run (None when unknown: recipes that need
    it say so). Subclasses take their hyperparameters as keyword arguments under the names of their paper.
    State of one weight belongs in buffers of its ``Projection`` (see :meth:`attach`), so that it travels with the model's
    state dict; state of the run belongs in :meth:`state_dict`.
    """

    name: ClassVar[str] = ""

    def __init__(self, pattern: Pattern, total_steps: int | None = None) -> None:
        self.pattern, self.total_steps = pattern, total_steps
        self.step = 0  # optimizer steps done
        self.dense_forward = False  # True while the forward pass uses the dense weight itself
        self.events: list[str] = []  # sentences for the log

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self  # a deep copy of a model (EMA) follows the same clock

    @property
    def phase(self) -> str:
        """``"dense"`` or ``"sparse"``: what the forward pass uses now."""
        return "dense" if self.dense_forward else "sparse"

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Called once, after the weights are parametrized: check the optimizer, register buffers on ``weight.projection``."""

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        """Write the forward weight into ``out`` (same shape; no autograd here). Default: keep the N largest magnitudes of M."""
        if not cpu.project(dense, out, projection.pattern, projection.dim):
            out.copy_(masks.hard_threshold(dense, projection.pattern, projection.dim))

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Change ``weight.dense.grad`` in place, once per optimizer step, just before the update."""

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Called after each optimizer step, when ``self.step`` counts it already: the place to change phase."""

    def metrics(self) -> dict[str, float]:
        """Scalars for the log, read now and then."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers that a resumed run needs besides the buffers."""
        return {"step": self.step, "dense_forward": self.dense_forward}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, given after the model's and the optimizer's own state are back."""
        self.step, self.dense_forward = int(state["step"]), bool(state["dense_forward"])


@torch.no_grad()
def decay_pruned(weights: Sequence[SparseWeight], decay: float) -> None:
    """SR-STE's term, ``grad += decay * (1 - mask) * w``: with a hard mask, ``(1 - mask) * w`` is dense minus projected, exactly."""
    if decay:
        for w in weights:  # one by one: the difference stays in the cache, where that of all weights would not
            if w.dense.grad is not None:
                w.dense.grad.add_(w.dense - w.weight, alpha=decay)
