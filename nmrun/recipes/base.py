"""What a recipe is: two functions and a clock.

``project`` maps the dense weight to the weight that the forward pass uses, ``edit_gradient`` changes the dense gradient once per
optimizer step (after unscaling and clipping), and ``step`` with ``total_steps`` tells which phase the run is in. The gradient of
the projected weight reaches the dense weight unchanged (straight-through). A new recipe overrides what differs from plain STE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nmrun import kernels
from nmrun.kernels.adam import Around
from nmrun.patterns import Pattern
from nmrun.sparsity import masks
from nmrun.sparsity.transposable import transposable_mask

if TYPE_CHECKING:
    from nmrun.sparsity.weight import Projection, SparseWeight


AROUND = ("edit_gradients", "project", "after_step")  # what a recipe does around an optimizer step


class Densities(NamedTuple):
    """What the three products of a layer cost in a training step, as shares of the dense ones."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0


def hardware_density(pattern: Pattern) -> float:
    """What 2:4 sparse tensor cores make of a product with a weight that is N:M along the dimension that is summed over.

    They halve it where the weight is 2:4 as well. All else they compute as dense: 1.0 for 4:8 or 2:6. A dimension that four do not
    divide is filled up with zeros.
    """
    computed = -(-pattern.length // 4) * 4 / pattern.length if pattern.length else 1.0
    return min(1.0, 0.5 * computed) if pattern.fits_2_4 else 1.0


class Recipe:
    """Base of all recipes; by itself the hard-threshold straight-through estimator.

    ``pattern`` is the target, ``total_steps`` the number of optimizer steps of the whole run (None when unknown: recipes that need
    it say so). Subclasses take their hyperparameters as keyword arguments under the names of their paper.
    State of one weight belongs in buffers of its ``Projection`` (see :meth:`attach`), so that it travels with the model's
    state dict; state of the run belongs in :meth:`state_dict`.
    """

    name: ClassVar[str] = ""
    gradient_is_masked = False  # pruned weights get no gradient: it need not be computed
    by_rows = False  # what is done to one output's weights depends on no other's: shards of rows can be trained (FSDP)
    input_gradient_is_nm = False  # the weight that the input's gradient is computed with is N:M along the outputs too
    chooses_largest = False  # its masks are what :meth:`choose` says, so they can be transposable instead
    transposable = False  # masks are N:M along the outputs as well

    def __init__(self, pattern: Pattern, total_steps: int | None = None) -> None:
        self.pattern, self.total_steps = pattern, total_steps
        self.step = 0  # optimizer steps done
        self.dense_forward = False  # True while the forward pass uses the dense weight itself
        self.dense_steps = 0  # how many steps at the beginning are planned before the weights are N:M, at most
        self.events: list[str] = []  # sentences for the log
        # called with (parameter name, dim, index) for a parameter that becomes ``p.index_select(dim, index)``: for who remembers masks
        self.followers: list[Callable[[str, int, Tensor], None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self  # a deep copy of a model (EMA) follows the same clock

    @property
    def phase(self) -> str:
        """What the forward pass uses now: ``"dense"`` weights, ``"sparse"`` ones, or in ``"transition"`` something between."""
        return "dense" if self.dense_forward else "sparse" if self.is_sparse else "transition"

    @property
    def is_sparse(self) -> bool:
        """Whether the forward weights hold the target pattern now. Default: whenever they are not the dense weights."""
        return not self.dense_forward

    def refuses(self, shape: Sequence[int], dim: int, pattern: Pattern) -> str:
        """Why this recipe cannot make a weight of this shape sparse, beyond M not dividing the inputs; empty if it can."""
        outputs = shape[1 - dim]
        if self.transposable and outputs % pattern.m:
            return f"{outputs} outputs are not a multiple of {pattern.m}, which a transposable mask needs"
        return ""

    def make_transposable(self) -> None:
        """Choose transposable masks from now on. Raises ValueError for a recipe whose masks are not simply chosen."""
        if not self.chooses_largest:
            raise ValueError(
                f"{self.name} has masks of its own: transposable ones are for recipes that keep the largest weights (asp, sr_ste, ste, "
                "step, t_sr_ste)"
            )
        self.transposable = self.input_gradient_is_nm = True

    def prepare(self, model: nn.Module) -> None:
        """Called once, before any weight is parametrized: for a recipe that has to know the network around its weights."""

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Called once, after the weights are parametrized: check the optimizer, register buffers on ``weight.projection``."""

    def choose(self, projection: Projection, dense: Tensor) -> Tensor:
        """The mask (bool, shape of ``dense``) for this weight: the N largest magnitudes of M, or the best transposable one."""
        if not self.transposable:
            return masks.nm_mask(dense, projection.pattern, projection.dim)
        sides = (1 - projection.dim, projection.dim)
        at_each_position = dense.movedim(sides, (-2, -1))  # a convolution has one matrix (out, in) for each kernel position
        matrix = at_each_position.reshape(-1, dense.shape[projection.dim])
        return transposable_mask(matrix, projection.pattern).reshape(at_each_position.shape).movedim((-2, -1), sides)

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        """Write the forward weight into ``out`` (same shape; no autograd here). Default: what :meth:`choose` keeps."""
        if self.transposable:
            torch.mul(dense, self.choose(projection, dense), out=out)
        else:
            keep_largest(dense, out, projection.pattern, projection.dim)

    def final(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        """Write the weight that the run would leave, were it to end now. Default: the projection, before that the largest weights."""
        if self.is_sparse:
            self.project(projection, dense, out)
        else:
            Recipe.project(self, projection, dense, out)

    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Change ``weight.dense.grad`` in place, once per optimizer step, just before the update."""

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Called after each optimizer step, when ``self.step`` counts it already: the place to change phase."""

    @property
    def keeps_largest(self) -> bool:
        """Whether :meth:`project` is the N largest of M, nothing else: then all weights can be projected at once."""
        return type(self).project is Recipe.project and not self.transposable

    def follow(self, projection: Projection) -> None:
        """Called whenever ``projection.projected`` has been rewritten: for what else depends on it (no autograd here)."""

    def around(self, projection: Projection) -> Around | None:
        """What :meth:`edit_gradients` and :meth:`project` will do to this weight in the coming step, in terms of a fused optimizer step.

        Such a step then does it in one pass (``nmrun.optim.Adam.project_with``), and neither is called for the weight. Default: None, both are.
        """
        return None

    def around_largest(self, pattern: Pattern, decay: float = 0.0) -> Around | None:
        """:meth:`around` where masks are chosen anew after every step: transposable ones no kernel chooses."""
        return None if self.transposable else Around(pattern, decay=decay)

    @property
    def fusable(self) -> bool:
        """Whether :meth:`around` speaks for this class: not if a subclass has overridden what happens around a step, but not that."""
        order = [vars(kind) for kind in type(self).__mro__]
        first = {name: next(i for i, own in enumerate(order) if name in own) for name in ("around", *AROUND)}
        return all(first["around"] <= first[name] for name in AROUND)

    def densities(self, pattern: Pattern, step: int | None = None, hardware: bool = False) -> Densities:
        """What the products of a layer that is to be ``pattern`` cost: in the next step, or in step ``step`` (from 0) as planned.

        Arithmetically, products with the weight have N/M of their multiplications once the weight is N:M, and so has the weight's
        gradient if it is masked. On ``hardware`` see :func:`hardware_density`: only a sparse operand counts, so the weight's gradient is
        dense, and the input's, which sums over the outputs, as well unless ``input_gradient_is_nm``.
        """
        if not (self.is_sparse if step is None else step >= self.dense_steps):
            return Densities()
        if hardware:
            halved = hardware_density(pattern)
            return Densities(halved, halved if self.input_gradient_is_nm else 1.0)
        return Densities(pattern.density, pattern.density, pattern.density if self.gradient_is_masked else 1.0)

    def metrics(self) -> dict[str, float]:
        """Scalars for the log, read now and then."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers that a resumed run needs besides the buffers."""
        return {"step": self.step, "dense_forward": self.dense_forward}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, given after the model's and the optimizer's own state are back."""
        self.step, self.dense_forward = int(state["step"]), bool(state["dense_forward"])


def keep_largest(dense: Tensor, out: Tensor, pattern: Pattern, dim: int) -> None:
    """Write ``m * w`` into ``out``, with m the N largest magnitudes of every M along ``dim``: the compiled way where it applies."""
    if not kernels.project(dense, out, pattern, dim):
        out.copy_(masks.hard_threshold(dense, pattern, dim))


@torch.no_grad()
def decay_pruned(weights: Sequence[SparseWeight], decay: float) -> None:
    """SR-STE's term, ``grad += decay * (1 - mask) * w``: with a hard mask, ``(1 - mask) * w`` is dense minus projected, exactly."""
    if decay:
        for w in weights:  # one by one: the difference stays in the cache, where that of all weights would not
            if w.dense.grad is not None:
                w.dense.grad.add_(w.dense - w.weight, alpha=decay)
