"""The parameters of a model under all their names, and what is settled before anybody asks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parameter import UninitializedParameter

from nmrun.sparsity.layers import EMBEDDING, Axes, axes, given, obstacle

Named = Callable[["Place"], int | None]  # the dimension that somebody named for a place
ADAPTER = re.compile(r"lora_.*|ia3_.*", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """One name of a parameter of two dimensions or more.

    Attributes:
        module_name: the whole name of the module that holds it.
        module: that module.
        attribute: the parameter's name there.
        parameter: the parameter.
        axes: what its dimensions mean, None where that is unknown.
        obstacle: why it is dense whatever is asked for, or empty.
        adapter: whether it is a part of an adapter (LoRA and its kin).
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
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def modules(self) -> list[str]:
        return [name.rpartition(".")[0] for name in self.names]

    @property
    def shape(self) -> tuple[int, ...]:
        lazy = isinstance(self.parameter, UninitializedParameter)
        return () if lazy else tuple(self.parameter.shape)

    @property
    def layer(self) -> Axes | None:
        """The axes of a weight that may be sparse."""
        return None if self.obstacle else self.axes


def places(model: nn.Module) -> list[Place]:
    """List the names of parameters with two dimensions or more, in the order of the modules.

    Args:
        model: the model.

    Returns:
        A place for each name; nothing is known of them yet but names.
    """
    found = [
        Place(module_name, module, attribute, parameter)
        for module_name, module in model.named_modules(remove_duplicate=False)
        for attribute, parameter in module._parameters.items()
        if parameter is not None and _is_matrix(parameter)
    ]
    names: dict[int, list[str]] = {}
    for place in found:
        names.setdefault(id(place.parameter), []).append(place.name)
    return [replace(place, names=tuple(names[id(place.parameter)])) for place in found]


def settled(model: nn.Module, found: Sequence[Place], dim: Named) -> list[Place]:
    """Tell the axes of every place, or the obstacle.

    Args:
        model: the model.
        found: its places.
        dim: gives the dimension that somebody named for a place, or None.

    Returns:
        The places in the same order. Those of one parameter that do not go together are obstacles
        to each other.
    """
    prefixes = _adapters(model)
    known = [_known(place, dim(place), prefixes) for place in found]
    groups: dict[int, list[Place]] = {}
    for place in known:
        groups.setdefault(id(place.parameter), []).append(place)
    return [replace(p, obstacle=p.obstacle or _tie(p, groups[id(p.parameter)])) for p in known]


def _is_matrix(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, UninitializedParameter) or parameter.dim() >= 2


def _known(place: Place, dim: int | None, prefixes: Sequence[str]) -> Place:
    meaning = axes(place.module).get(place.attribute)
    if dim is not None:
        meaning = given(dim, len(place.shape))
    reason = obstacle(place.module, place.attribute, named=dim is not None)
    adapter = any(ADAPTER.fullmatch(part) for part in place.name.split("."))
    adapter = adapter or f"{place.name}.".startswith(tuple(prefixes))
    return replace(place, axes=meaning, obstacle=reason, adapter=adapter)


def _tie(place: Place, group: Sequence[Place]) -> str:
    """Say which other place of a parameter keeps it dense, or nothing."""
    others = [p for p in group if p.name != place.name]
    for other in sorted(others, key=lambda p: p.obstacle != EMBEDDING):
        if other.obstacle:
            return f"tied to {other.name}"
        if other.axes != place.axes:
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
