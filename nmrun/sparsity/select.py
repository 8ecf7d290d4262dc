"""Which weights become sparse, and why the others stay dense."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.sparsity.options import Options
from nmrun.sparsity.parameters import NamedParameter

Refuses = Callable[[Sequence[int], int, Pattern], str]  # (shape, outputs, pattern) -> reason


@dataclass(frozen=True)
class Candidate:
    """A weight that multiplies an input.

    Attributes:
        module_name: the whole name of the module that has the weight.
        module: this module.
        attribute: the weight's name in the module.
        dim: the dimension that a product sums over. Groups run along it.
        pattern: the N:M pattern of a chosen weight; None of others.
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
        """The whole name."""
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def tensor(self) -> Tensor:
        """The weight."""
        return getattr(self.module, self.attribute)


@dataclass(frozen=True)
class LeftDense:
    """A parameter of two dimensions or more that is not sparse, with the reason.

    Attributes:
        name: its whole name.
        shape: its shape; empty before a lazy module knows it.
        reason: why it is dense, as a clause for a report.
    """

    name: str
    shape: tuple[int, ...]
    reason: str


def by_reason(left: Sequence[LeftDense]) -> str:
    """Name the first parameter for each reason, and how many more there are; eight at most."""
    groups: dict[str, list[LeftDense]] = {}
    for each in left:
        groups.setdefault(each.reason, []).append(each)
    return "; ".join(
        f"{some[0].name} {list(some[0].shape)}"
        + (f" and {len(some) - 1} more" if len(some) > 1 else "")
        + f": {reason}"
        for reason, some in list(groups.items())[:8]
    )


def candidates(model: nn.Module, dims: Mapping[str, int] | None = None) -> Iterator[Candidate]:
    """List every weight that multiplies an input.

    Linear layers, convolutions, attention projections, recurrent and bilinear layers and the
    experts of a mixture have such weights. A weight that is computed (weight_norm and the like) is
    left out.

    Args:
        model: the model.
        dims: as in :func:`select`.

    Yields:
        The weights in the order of ``named_parameters``, each once.

    Raises:
        ConfigError: for a mistake in ``dims``.
    """
    seen: set[int] = set()
    for found in Options(model, dims=dims).parameters:
        if found.may_be_sparse and id(found.parameter) not in seen:
            seen.add(id(found.parameter))
            yield _candidate(found)


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

    A regular expression must match a whole name. An expression that matches nothing is a mistake.

    Args:
        model: the model; its parameters may be on the meta device.
        pattern: the N:M pattern where no override names another.
        include: expressions for module names; all other modules stay dense. None, the default,
            includes every module without adapters (LoRA), which have to be named.
        exclude: expressions for module names; these modules stay dense. ``"auto"`` among them means
            the first layer and the heads.
        owned: ids of the parameters that an optimizer updates; others stay dense. None, the
            default, does not ask whether a parameter is trained.
        overrides: another pattern, or ``"dense"``, by expressions for module names. The first
            that matches counts, and more than ``exclude``.
        refuses: a recipe's own check, ``refuses(shape, outputs, pattern)``, with the dimension of
            the outputs; returns the reason against a weight, or an empty string.
        pad: let the last group of a weight be short (see :meth:`Pattern.over`).
        dims: the dimension that groups run along, by expressions for parameter names. It makes
            weights of unknown layers candidates. The first that matches counts.

    Returns:
        The sparse weights, and the parameters left dense with the reason, both in the order of
        ``named_parameters``. A weight that two layers share is sparse once, under its first name.

    Raises:
        ConfigError: for regular expressions that do not compile or match nothing, for wrong
            patterns and dimensions, and for an override that none of its layers can hold.
    """
    options = Options(model, include, exclude, overrides, dims)
    sparse: list[Candidate] = []
    dense: list[LeftDense] = []
    seen: dict[int, str] = {}  # a parameter's first name; empty where that one is sparse
    fits: dict[
        str, str
    ] = {}  # by override: why its first weight does not hold it; empty where one does
    for found in options.parameters:
        own = options.pattern(found, pattern)
        if (first := seen.get(id(found.parameter))) is not None:
            if not first:
                continue
            reason = options.reason(found) or f"tied to {first}"
        else:
            reason = options.reason(found) or _untrained(found, owned)
            if (text := options.override(found)) and not reason:
                unfit = _unfit(found, own, pad)
                fits[text] = unfit and fits.get(text, f"{found.name} with {own}: {unfit}")
            reason = reason or _unfit(found, own, pad) or _refused(found, own, refuses)
            seen[id(found.parameter)] = found.name if reason else ""
        if reason:
            dense.append(LeftDense(found.name, found.shape, reason))
        else:
            sparse.append(_candidate(found, own, pad))
    if wrong := [f"overrides: {text!r} fits no layer: {why}" for text, why in fits.items() if why]:
        raise ConfigError(wrong)
    return sparse, dense


def _candidate(
    found: NamedParameter, pattern: Pattern | None = None, pad: bool = False
) -> Candidate:
    assert found.axes is not None
    dim = found.axes.dim
    if pattern is not None and pad:
        pattern = pattern.over(found.shape[dim])
    name, module, attribute = found.module_name, found.module, found.attribute
    return Candidate(name, module, attribute, dim, pattern, found.axes.outputs)


def _untrained(found: NamedParameter, owned: Collection[int] | None) -> str:
    """Say why the optimizer does not train a parameter, or nothing."""
    if owned is None or (found.parameter.requires_grad and id(found.parameter) in owned):
        return ""
    return "not in the optimizer" if found.parameter.requires_grad else "frozen"


def _unfit(found: NamedParameter, pattern: Pattern, pad: bool) -> str:
    """Say why a weight of this size cannot hold the pattern, or nothing."""
    assert found.axes is not None
    dim, outputs = found.axes.dim, found.axes.outputs
    if pattern.v > 1 and outputs != (1 if dim == 0 else 0):
        return f"{pattern} is for matrices and convolutions, whose outputs lie along one dimension"
    if found.shape[outputs] % pattern.v:
        return f"{found.shape[outputs]} outputs are not a multiple of {pattern.v}"
    inputs = found.shape[dim] // found.axes.parts
    if inputs % pattern.m == 0:
        return ""
    if found.axes.parts > 1:
        return f"{inputs} inputs of one group are not a multiple of {pattern.m}"
    reason = f"{inputs} inputs are not a multiple of {pattern.m}"
    if inputs <= pattern.n:
        return f"{reason}, and {pattern} would prune none of them"
    return "" if pad else f"{reason} (the option pad allows that)"


def _refused(found: NamedParameter, pattern: Pattern, refuses: Refuses | None) -> str:
    assert found.axes is not None
    return refuses(found.parameter.shape, found.axes.outputs, pattern) if refuses else ""
