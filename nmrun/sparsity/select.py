"""Which weights become sparse, and why the others stay dense."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from nmrun.patterns import Pattern
from nmrun.sparsity.asked import Asked
from nmrun.sparsity.places import Place

Refuses = Callable[[Sequence[int], int, Pattern], str]  # (shape, outputs, pattern) -> reason


@dataclass(frozen=True)
class Candidate:
    """A weight that multiplies an input.

    Attributes:
        module_name: the whole name of the module that holds it.
        module: that module.
        attribute: the parameter's name there.
        dim: the dimension that a product sums over. Groups run along it.
        pattern: the N:M pattern, once the weight is chosen.
        outputs: the dimension of the outputs.
    """

    module_name: str
    module: nn.Module
    attribute: str
    dim: int
    pattern: Pattern | None = None
    outputs: int = 0

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.attribute)


@dataclass(frozen=True)
class LeftDense:
    """A parameter of two dimensions or more that is not sparse, with the reason."""

    name: str
    shape: tuple[int, ...]
    reason: str


def candidates(model: nn.Module, dims: Mapping[str, int] | None = None) -> Iterator[Candidate]:
    """List every weight that multiplies an input.

    Linear layers, convolutions, attention projections, recurrent and bilinear layers and the
    experts of a mixture have such weights. What weight_norm and the like compute is none.

    Args:
        model: the model.
        dims: as in :func:`select`.

    Yields:
        The weights in the order of ``named_parameters``, each once.

    Raises:
        ConfigError: a mistake in ``dims``.
    """
    seen: set[int] = set()
    for place in Asked(model, dims=dims).places:
        if place.layer is not None and id(place.parameter) not in seen:
            seen.add(id(place.parameter))
            yield _candidate(place)


def select(
    model: nn.Module,
    pattern: Pattern,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    owned: Collection[int] | None = None,
    overrides: Mapping[str, str | Pattern] | None = None,
    refuses: Refuses | None = None,
    pad: bool = False,
    dims: Mapping[str, int] | None = None,
) -> tuple[list[Candidate], list[LeftDense]]:
    """Split the parameters of two dimensions or more into sparse ones and dense ones.

    An expression must match a whole name. One that matches nothing is a mistake.

    Args:
        model: the model; its parameters may be on the meta device.
        pattern: the N:M pattern where no override names another.
        include: expressions for module names; only these are sparse. Adapters (LoRA) are sparse
            only where such an expression matches them.
        exclude: expressions for module names; these stay dense. ``"auto"`` among them means the
            first layer and the heads.
        owned: ids of the parameters that an optimizer updates. By default nobody trains.
        overrides: another pattern, or ``"dense"``, by expressions for module names. The first
            that matches counts, and more than ``exclude``.
        refuses: ``refuses(shape, outputs, pattern)``, with the dimension of the outputs, is a
        recipe's own reason against a weight. pad: let the last group of a weight be short (see
        :meth:`Pattern.over`). dims: the dimension that groups run along, by expressions for
        parameter names. It makes
            weights of unknown layers candidates. The first that matches counts.

    Returns:
        The sparse weights, and the parameters left dense with the reason, both in the order of
        ``named_parameters``. A weight that two layers share is sparse once, under its first name.

    Raises:
        ConfigError: expressions that are none or match nothing, wrong patterns and dimensions.
    """
    asked = Asked(model, include, exclude, overrides, dims)
    sparse: list[Candidate] = []
    dense: list[LeftDense] = []
    seen: dict[int, str] = {}  # a parameter's first name; empty where that one is sparse
    for place in asked.places:
        own = asked.pattern(place, pattern)
        if (first := seen.get(id(place.parameter))) is not None:
            if not first:
                continue
            reason = asked.reason(place) or f"tied to {first}"
        else:
            reason = asked.reason(place) or _untrained(place, owned)
            reason = reason or _unfit(place, own, pad) or _refused(place, own, refuses)
            seen[id(place.parameter)] = place.name if reason else ""
        if reason:
            dense.append(LeftDense(place.name, place.shape, reason))
        else:
            sparse.append(_candidate(place, own, pad))
    return sparse, dense


def _candidate(place: Place, pattern: Pattern | None = None, pad: bool = False) -> Candidate:
    assert place.axes is not None
    dim = place.axes.dim
    if pattern is not None and pad:
        pattern = pattern.over(place.shape[dim])
    where = place.module_name, place.module, place.attribute
    return Candidate(*where, dim, pattern, place.axes.outputs)


def _untrained(place: Place, owned: Collection[int] | None) -> str:
    """Say why nobody trains a parameter, or nothing."""
    if owned is None or (place.parameter.requires_grad and id(place.parameter) in owned):
        return ""
    return "not in the optimizer" if place.parameter.requires_grad else "frozen"


def _unfit(place: Place, pattern: Pattern, pad: bool) -> str:
    """Say why a weight of this size cannot hold the pattern, or nothing."""
    assert place.axes is not None
    inputs = place.shape[place.axes.dim] // place.axes.parts
    if inputs % pattern.m == 0:
        return ""
    if place.axes.parts > 1:
        return f"{inputs} inputs of one group are not a multiple of {pattern.m}"
    reason = f"{inputs} inputs are not a multiple of {pattern.m}"
    if inputs <= pattern.n:
        return f"{reason}, and {pattern} would prune none of them"
    return "" if pad else f"{reason} (the option pad allows that)"


def _refused(place: Place, pattern: Pattern, refuses: Refuses | None) -> str:
    assert place.axes is not None
    return refuses(place.parameter.shape, place.axes.outputs, pattern) if refuses else ""
