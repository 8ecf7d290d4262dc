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
Choices = list[tuple[re.Pattern[str], T]]  # the first expression that matches counts


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
        if self._problems:  # what is no dimension says nothing of the places
            named = []
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
        if place.axes is None:
            return place.obstacle
        if self._include is not None and not wanted:
            return "not in include"
        if any(_match([expression], place.modules) for expression, _ in self._overrides):
            own = _first(self._overrides, place.modules)
            return place.obstacle if own else "dense by overrides"
        if _match(self._exclude, place.modules):
            return "excluded"
        ends = (self._ends[name] for name in place.names if name in self._ends)
        return place.obstacle or next(ends, "")

    # --- reading the options ----------------------------------------------------------------------

    def _modules(self, option: str, texts: Sequence[str]) -> list[re.Pattern[str]]:
        """Compile expressions for modules; note those that match none."""
        every = list(dict.fromkeys(place.module_name for place in self.places))
        compiled = []
        for text in texts:
            if (expression := self._compiled(option, text)) is None:
                continue
            compiled.append(expression)
            if not _match([expression], every):
                layers = (p.module_name or "(the model itself)" for p in self.places if p.layer)
                lost = f"{option}: {text!r} matches no layer's whole name"
                self._problems.append(f"{lost}; there are {_some(layers)}")
        return compiled

    def _patterns(self, overrides: Mapping[str, str | Pattern]) -> Choices[Pattern | None]:
        """Read the overrides; None stands for dense."""
        found: Choices[Pattern | None] = []
        for text, ratio in overrides.items():
            try:
                own = None if ratio == "dense" else Pattern.parse(ratio)
            except PatternError as error:
                self._problems.append(f"overrides: {text!r}: {error}")
                continue
            found += [(expression, own) for expression in self._modules("overrides", [text])]
        return found

    def _dims(self, found: Sequence[Place], dims: Mapping[str, int]) -> Choices[int]:
        """Read the dimensions; note those that some parameter does not have."""
        named: Choices[int] = []
        for text, dim in dims.items():
            if (expression := self._compiled("dims", text)) is None:
                continue
            named.append((expression, dim))
            meant = [place for place in found if _match([expression], place.names)]
            if not meant:
                lost = f"dims: {text!r} matches no parameter of two dimensions or more"
                self._problems.append(f"{lost}; there are {_some(place.name for place in found)}")
            wrong = [p for p in meant if p.shape and dim not in range(len(p.shape))]
            for place in wrong[:1]:
                lost = f"dims: {text!r}: {dim!r} is no dimension of {place.name}"
                self._problems.append(f"{lost} {list(place.shape)} (0 to {len(place.shape) - 1})")
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
