"""What a user asked for, by regular expressions on whole names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError
from nmrun.sparsity.ends import first_layer, heads
from nmrun.sparsity.layers import axes
from nmrun.sparsity.places import Place, places, settled

AUTO = "auto"  # in exclude: the first layer and the heads
FIRST, HEAD = "first layer (exclude=auto)", "head (exclude=auto)"

Texts = str | Sequence[str]
T = TypeVar("T")


class Asked:
    """The options of a selection, checked together.

    Args:
        model: the model.
        include: as in :func:`nmrun.sparsity.select.select`, like the others.
        exclude: which weights stay dense.
        overrides: which patterns some weights have.
        dims: along which dimension groups run.

    Attributes:
        places: the parameters of two dimensions or more, under every name.

    Raises:
        ConfigError: all mistakes in the options.
    """

    def __init__(
        self,
        model: nn.Module,
        include: Texts | None = None,
        exclude: Texts = (),
        overrides: Mapping[str, str | Pattern] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> None:
        self._problems: list[str] = []
        found = places(model)
        named = self._dims(found, dims or {})
        self.places = settled(model, found, lambda place: _first(named, place.names))
        unwanted = _several(exclude)
        self._include = None if include is None else self._modules("include", _several(include))
        self._exclude = self._modules("exclude", [text for text in unwanted if text != AUTO])
        self._overrides = self._patterns(overrides or {})
        if self._problems:
            raise ConfigError(self._problems)
        self._ends = _ends(model, self.places) if AUTO in unwanted else {}

    def pattern(self, place: Place, default: Pattern) -> Pattern:
        """Return the pattern of a weight.

        Args:
            place: the weight.
            default: the pattern where no override matches.
        """
        return _first(self._overrides, place.modules) or default

    def reason(self, place: Place) -> str:
        """Say why a weight shall stay dense, or cannot be sparse.

        Args:
            place: the weight.

        Returns:
            The reason, or an empty string.
        """
        wanted = self._include is not None and _match(self._include, place.modules)
        if place.adapter and not wanted:
            return "an adapter (LoRA); include names it if it is meant"
        if place.obstacle:
            return place.obstacle
        if self._include is not None and not wanted:
            return "not in include"
        if any(_match([expression], place.modules) for expression, _ in self._overrides):
            return "" if _first(self._overrides, place.modules) else "dense by overrides"
        if _match(self._exclude, place.modules):
            return "excluded"
        return next((self._ends[name] for name in place.names if name in self._ends), "")

    # --- reading the options -----------------------------------------------------------------------

    def _modules(self, option: str, texts: Sequence[str]) -> list[re.Pattern[str]]:
        """Compile expressions for modules; note those that match none."""
        every = [module for place in self.places for module in place.modules]
        layers = [place.module_name for place in self.places if place.layer]
        compiled = []
        for text in texts:
            if (expression := self._compiled(option, text)) is None:
                continue
            compiled.append(expression)
            if not _match([expression], every):
                there = _some(name or "(the model itself)" for name in layers)
                self._problems.append(
                    f"{option}: {text!r} matches no layer's whole name; there are {there}"
                )
        return compiled

    def _patterns(
        self, overrides: Mapping[str, str | Pattern]
    ) -> list[tuple[re.Pattern[str], Pattern | None]]:
        """Read the overrides; None stands for dense."""
        found: list[tuple[re.Pattern[str], Pattern | None]] = []
        for text, ratio in overrides.items():
            try:
                own = None if ratio == "dense" else Pattern.parse(ratio)
            except PatternError as error:
                self._problems.append(f"overrides: {text!r}: {error}")
                continue
            found += [(expression, own) for expression in self._modules("overrides", [text])]
        return found

    def _dims(
        self, found: Sequence[Place], dims: Mapping[str, int]
    ) -> list[tuple[re.Pattern[str], int]]:
        """Read the dimensions; note those that some parameter does not have."""
        named = []
        for text, dim in dims.items():
            if (expression := self._compiled("dims", text)) is None:
                continue
            meant = [place for place in found if _match([expression], place.names)]
            if not meant:
                there = _some(place.name for place in found)
                self._problems.append(
                    f"dims: {text!r} matches no whole name of a parameter of two dimensions or "
                    f"more; there are {there}"
                )
            for place in meant:
                count = len(place.shape)
                if not (isinstance(dim, int) and 0 <= dim < count):
                    self._problems.append(
                        f"dims: {text!r}: {dim!r} is no dimension of {place.name} "
                        f"{list(place.shape)}; it takes 0 to {count - 1}"
                    )
                    break
            else:
                named.append((expression, dim))
        return named

    def _compiled(self, option: str, text: str) -> re.Pattern[str] | None:
        try:
            return re.compile(text)
        except re.error as error:
            self._problems.append(f"{option}: {text!r} is not a regular expression: {error}")
            return None


def _ends(model: nn.Module, found: Sequence[Place]) -> dict[str, str]:
    """Name the weights of the first layer and the heads, with the reason."""
    adapters = {place.module_name for place in found if place.adapter}
    layers = [n for n, module in model.named_modules() if axes(module) and n not in adapters]
    last, first = heads(model, layers), first_layer(model)
    both = () if first is None else (first, f"{first}_reverse")
    ends = {place.name: HEAD for place in found if place.module_name in last}
    return ends | {place.name: FIRST for place in found if place.name in both}


def _several(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _some(names: Iterable[str]) -> str:
    """Write a dozen of the names."""
    every = list(dict.fromkeys(names))
    return ", ".join(every[:12]) + (", ..." if len(every) > 12 else "")


def _match(expressions: Iterable[re.Pattern[str]], names: Sequence[str]) -> bool:
    return any(expression.fullmatch(name) for expression in expressions for name in names)


def _first(pairs: Iterable[tuple[re.Pattern[str], T]], names: Sequence[str]) -> T | None:
    """Return what stands beside the first expression that matches."""
    return next((value for expression, value in pairs if _match([expression], names)), None)
