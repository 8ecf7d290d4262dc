"""The parameters of a model under all their names, with what their dimensions mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parameter import UninitializedParameter

from nmrun.sparsity.layers import EMBEDDING, Axes, axes, axes_along, obstacle

ADAPTER = re.compile(r"lora_.*|ia3_.*", re.IGNORECASE)


@dataclass(frozen=True)
class NamedParameter:
    """One name of a parameter of two dimensions or more.

    Attributes:
        module_name: the whole name of the module that has the parameter.
        module: this module.
        attribute: the parameter's name in the module.
        parameter: the parameter.
        axes: what its dimensions mean; None where nobody knows.
        obstacle: why it cannot be sparse, whatever the options; empty if it can.
        adapter: whether it belongs to an adapter (LoRA, IA3).
        names: all names of the parameter, this one among them.
    """

    module_name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    axes: Axes | None = None
    obstacle: str = ""
    adapter: bool = False
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The whole name."""
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def module_names(self) -> list[str]:
        """The whole names of the modules that have the parameter."""
        return [name.rpartition(".")[0] for name in self.names]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; empty before a lazy module knows it."""
        lazy = isinstance(self.parameter, UninitializedParameter)
        return () if lazy else tuple(self.parameter.shape)

    @property
    def may_be_sparse(self) -> bool:
        """Whether its axes are known and nothing stands against it."""
        return self.axes is not None and not self.obstacle


def named_parameters(model: nn.Module) -> list[NamedParameter]:
    """List the names of all parameters with two dimensions or more.

    Args:
        model: the model.

    Returns:
        One entry for each name, in the order of the modules, without axes and obstacles.
    """
    found = [
        NamedParameter(module_name, module, attribute, parameter)
        for module_name, module in model.named_modules(remove_duplicate=False)
        for attribute, parameter in module._parameters.items()
        if parameter is not None and _is_matrix(parameter)
    ]
    names: dict[int, list[str]] = {}
    for each in found:
        names.setdefault(id(each.parameter), []).append(each.name)
    return [replace(each, names=tuple(names[id(each.parameter)])) for each in found]


def with_axes(
    model: nn.Module,
    found: Sequence[NamedParameter],
    named_dim: Callable[[NamedParameter], int | None],
) -> list[NamedParameter]:
    """Find the axes of named parameters, and the obstacles.

    Args:
        model: the model.
        found: its named parameters.
        named_dim: returns the input dimension that the user named for a parameter, or None.

    Returns:
        The same entries in the same order, completed. Names of one parameter that differ in their
        axes, or of which one has an obstacle, are obstacles to each other.
    """
    prefixes = _adapters(model)
    known = [_completed(each, named_dim(each), prefixes) for each in found]
    same: dict[int, list[NamedParameter]] = {}
    for each in known:
        same.setdefault(id(each.parameter), []).append(each)
    return [replace(p, obstacle=p.obstacle or _tie(p, same[id(p.parameter)])) for p in known]


def _is_matrix(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, UninitializedParameter) or parameter.dim() >= 2


def _completed(found: NamedParameter, dim: int | None, prefixes: Sequence[str]) -> NamedParameter:
    meaning = axes(found.module).get(found.attribute)
    if dim is not None:
        meaning = axes_along(dim, len(found.shape))
    reason = obstacle(found.module, found.attribute, named=dim is not None)
    adapter = any(ADAPTER.fullmatch(part) for part in found.name.split("."))
    adapter = adapter or f"{found.name}.".startswith(tuple(prefixes))
    return replace(found, axes=meaning, obstacle=reason, adapter=adapter)


def _tie(found: NamedParameter, same: Sequence[NamedParameter]) -> str:
    """Say which other name of a parameter keeps it dense, or nothing."""
    others = [p for p in same if p.name != found.name]
    for other in sorted(others, key=lambda p: p.obstacle != EMBEDDING):
        if other.obstacle:
            return f"tied to {other.name}"
        if other.axes != found.axes:
            return f"tied to {other.name}, which sums over another dimension"
    return ""


def _adapters(model: nn.Module) -> list[str]:
    """List the prefixes of adapters: PEFT's layers name the children that belong to one.

    ``modules_to_save`` among them is a whole layer, trained in full.
    """
    return [
        f"{name}.{child}.".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        for child in getattr(module, "adapter_layer_names", ())
        if child != "modules_to_save"
    ]
