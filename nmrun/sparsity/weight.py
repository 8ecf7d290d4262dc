"""How a projected weight gets into a model: a parametrization with a cached working copy and a straight-through gradient.

The dense weight stays the ``nn.Parameter`` that the optimizer owns. Any read of ``module.weight`` (or ``in_proj_weight``, ...)
yields the projected copy, which is rewritten in place once per optimizer step, so nothing is recomputed per forward pass
and compiled code sees the same tensor throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nmrun.patterns import Pattern
from nmrun.products import simulated

if TYPE_CHECKING:
    from nmrun.products.linear24 import Packed
    from nmrun.recipes.base import Recipe
    from nmrun.train.sharded import Shard


class StraightThrough(torch.autograd.Function):
    """Forward: the projected weight. Backward: its gradient reaches the dense weight unchanged (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, projected: Tensor) -> Tensor:
        return projected.view_as(projected)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Projection(nn.Module):
    """The parametrization of one sparse weight. Holds the working copy (not saved) and the recipe's buffers (saved).

    ``recipe`` is shared by all weights and by deep copies of the model: an EMA copy follows the phase of the original, and
    projects its own averaged weights, since the working copy is rewritten on access whenever the dense weight has changed.
    """

    projected: Tensor

    def __init__(self, name: str, dense: Tensor, pattern: Pattern, dim: int, recipe: Recipe) -> None:
        super().__init__()
        self.name, self.pattern, self.dim, self.recipe = name, pattern, dim, recipe
        self.order: list[str] = []  # the names of its module's parameters as they were
        self.copied = False
        self.prunes_again = False  # keep ``input_weight``, the projected weight pruned to N:M along the outputs as well
        self.mvue: Pattern | None = None  # how its layer's products are rounded: see ``nmrun.products.simulated``
        self.fp8 = False
        self.packed: Packed | None = None  # what 2:4 products read, where the layer has one
        # it is up to date: a flag, since compiled code would watch the clock of a recipe that is asked
        self.uses_packed = False
        self.shard: Shard | None = None  # set where this process has a part of the weight only
        self.register_buffer("projected", torch.zeros_like(dense), persistent=False)
        self._seen: tuple[int, int, int] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.copied = True  # this is how a deep copy comes to life

    def forward(self, dense: Tensor) -> Tensor:
        if self.recipe.dense_forward or self.shard is not None:  # a shard's parameter is gathered from the working copies
            return dense
        if not torch.compiler.is_compiling():
            self.refresh_if_stale(dense)
        elif self.copied:  # a copy is refreshed by nobody after a step, so compiled code must stop and look
            self._refresh_uncompiled(dense)
        return StraightThrough.apply(dense, self.projected)

    @torch.no_grad()
    def refresh(self, dense: Tensor) -> None:
        """Rewrite the working copy from the dense weight."""
        if self.shard is not None and self.recipe.dense_forward:
            self.projected.copy_(dense)
        else:
            self.recipe.project(self, dense.detach(), self.projected)
        self.follow(dense)

    @torch.no_grad()
    def follow(self, dense: Tensor) -> None:
        """The working copy holds the projection of ``dense``: make what depends on it anew."""
        self.recipe.follow(self)
        if self.prunes_again:
            from nmrun.recipes.base import keep_largest  # which imports this package

            keep_largest(self.projected, self.get_buffer("input_weight"), self.pattern, 1 - self.dim)
        if self.packed is not None:
            self.uses_packed = self.recipe.is_sparse
            if self.uses_packed:
                self.packed.write(*map(self.matrix, (self.projected, getattr(self, "input_weight", None))))
        self._seen = self._stamp(dense)

    def matrix(self, stored: Any) -> Any:
        """A linear layer's weight, or None, as (outputs, inputs), however the layer stores it."""
        return stored if stored is None or self.dim == 1 else stored.t()

    def refresh_if_stale(self, dense: Tensor) -> None:
        """Rewrite the working copy if ``dense`` has changed since it was written."""
        stamp = self._stamp(dense)
        if stamp is None or stamp != self._seen:
            self.refresh(dense)

    _refresh_uncompiled = torch.compiler.disable(refresh_if_stale)

    def _stamp(self, dense: Tensor) -> tuple[int, int, int] | None:
        """What tells whether the working copy is of these values; None for a tensor handed in for one call, which nothing tells."""
        if not isinstance(dense, nn.Parameter) or dense.is_inference():
            return None
        return dense.data_ptr(), dense._version, id(self.projected)

    def extra_repr(self) -> str:
        return f"{self.pattern} along dim {self.dim}, recipe={self.recipe.name}"


class SparseWeight:
    """One sparse weight of a model, looked up afresh at each use, so that nothing goes stale when a framework swaps tensors."""

    def __init__(self, module_name: str, module: nn.Module, attribute: str) -> None:
        self.module_name, self.module, self.attribute = module_name, module, attribute

    @property
    def name(self) -> str:
        """The parameter's name in the model before it was parametrized, such as ``layer1.conv.weight``."""
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def _list(self) -> Any:
        return self.module.parametrizations[self.attribute]  # type: ignore[index,union-attr]

    @property
    def projection(self) -> Projection:
        return next(p for p in self._list if isinstance(p, Projection))

    @property
    def original(self) -> nn.Parameter:
        """The parameter of the model: the dense weight, or with shards (``nmrun.train.sharded``) what is gathered from the working copies."""
        return self._list.original

    @property
    def dense(self) -> nn.Parameter:
        """The dense weight, the parameter that the optimizer updates; this process's rows of it, where it has a shard."""
        return self.parts[1]

    @property
    def parts(self) -> tuple[Projection, nn.Parameter]:
        """:attr:`projection` and :attr:`dense`, looked up at once."""
        chain = self._list
        projection = next(p for p in chain if isinstance(p, Projection))
        return projection, chain.original if projection.shard is None else projection.shard.rows

    @property
    def weight(self) -> Tensor:
        """The weight that the forward pass uses now (no gradient)."""
        if self.projection.shard is not None:
            return self.projection.projected
        with torch.no_grad():
            return getattr(self.module, self.attribute).detach()

    @property
    def projected(self) -> Tensor:
        """The N:M weight that the run would leave now, also in a phase whose forward pass uses another (no gradient)."""
        projection = self.projection
        if projection.recipe.is_sparse:
            projection.refresh(self.dense)
            return projection.projected
        out = torch.empty_like(self.dense, requires_grad=False)
        projection.recipe.final(projection, self.dense.detach(), out)
        return out

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like :attr:`dense`, of all processes' rows where there are shards: all of them have to ask."""
        shard = self.projection.shard
        return tensor if shard is None else shard.whole(tensor)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight."""
        return self.original.shape

    @property
    def pattern(self) -> Pattern:
        return self.projection.pattern

    @property
    def dim(self) -> int:
        return self.projection.dim


def attach(module_name: str, module: nn.Module, attribute: str, pattern: Pattern, dim: int, recipe: Recipe) -> SparseWeight:
    """Parametrize ``module.<attribute>``; the parameter object stays the same, so an optimizer that holds it needs no change."""
    site = SparseWeight(module_name, module, attribute)
    projection = Projection(site.name, getattr(module, attribute), pattern, dim, recipe)
    projection.order = list(module._parameters)
    projection.train(module.training)
    parametrize.register_parametrization(module, attribute, projection, unsafe=True)
    site._list.register_load_state_dict_post_hook(_refresh_loaded)
    return site


def _refresh_loaded(chain: nn.Module, incompatible_keys: Any) -> None:
    for projection in chain.children():
        if isinstance(projection, Projection) and not projection.recipe.dense_forward:
            projection.refresh(chain.original)  # type: ignore[arg-type]  # compiled code does not look by itself


def summed(weights: Sequence[SparseWeight], sums: Tensor) -> Tensor:
    """Sums over the rows of these weights, made sums over all rows (in place) where this process has a part of them only."""
    if weights and weights[0].projection.shard is not None:
        dist.all_reduce(sums)
    return sums


def attached(model: nn.Module) -> list[SparseWeight]:
    """The sparse weights of a model, found by their parametrizations: works on a deep copy too."""
    found = []
    for module_name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            for attribute, chain in module.parametrizations.items():  # type: ignore[union-attr,operator]
                if any(isinstance(p, Projection) for p in chain):
                    found.append(SparseWeight(module_name, module, attribute))
    return found


@torch.no_grad()
def detach(weight: SparseWeight) -> None:
    """Put the projected weight in the place of the parametrization: the same parameter object, now exactly N:M."""
    weight.dense.copy_(weight.projected + 0.0)
    if weight.projection.shard is None:
        release(weight)
    else:  # FSDP keeps hold of the parametrization
        weight.projection.projected.copy_(weight.dense)


def release(weight: SparseWeight) -> None:
    """Take the parametrization away: the dense weight is a plain parameter again, in its old place among the module's."""
    simulated.uninstall(weight)
    weight.projection.packed = None
    parameters, order = weight.module._parameters, weight.projection.order
    shared = type(weight.module)  # with deep copies, from whom parametrize would take the property as well
    weight.module.__class__ = type(shared.__name__, shared.__bases__, dict(vars(shared)))
    parametrize.remove_parametrizations(weight.module, weight.attribute, leave_parametrized=False)
    for name in order:
        if name in parameters:
            parameters[name] = parameters.pop(name)
