"""The options that select weights: include, exclude, overrides and dims.

Their keys are regular expressions for whole names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError
from nmrun.sparsity.first_last import first_layer, heads
from nmrun.sparsity.layers import axes
from nmrun.sparsity.parameters import NamedParameter, named_parameters, with_axes

AUTO = "auto"  # in exclude: the first layer and the heads
FIRST, HEAD = "first layer (exclude=auto)", "head (exclude=auto)"

T = TypeVar("T")
Choices = list[tuple[re.Pattern[str], T]]  # the first expression that matches counts


class Options:
    """The options of a selection, checked together.

    Args:
        model: the model.
        include, exclude, overrides, dims: as in :func:`nmrun.sparsity.select.select`.

    Attributes:
        parameters: the parameters of two dimensions or more, under all their names.

    Raises:
        ConfigError: with all mistakes in the options.
    """

    def __init__(
        self,
        model: nn.Module,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        overrides: Mapping[str, str | Pattern] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> None:
        self._problems: list[str] = []
        found = named_parameters(model)
        named = self._dims(found, dims or {})
        if self._problems:  # the axes cannot be told by wrong dimensions
            named = []
        self.parameters = with_axes(model, found, lambda each: _first(named, each.names))
        unwanted = _several(exclude)
        self._include = None if include is None else self._modules("include", _several(include))
        self._exclude = self._modules("exclude", [text for text in unwanted if text != AUTO])
        self._overrides = self._patterns(overrides or {})
        if self._problems:
            raise ConfigError(self._problems)
        self._ends = _ends(model, self.parameters) if AUTO in unwanted else {}

    def pattern(self, parameter: NamedParameter, default: Pattern) -> Pattern:
        """Return the pattern of a parameter.

        Args:
            parameter: the parameter.
            default: the pattern where no override matches.
        """
        return _first(self._overrides, parameter.module_names) or default

    def override(self, parameter: NamedParameter) -> str | None:
        """Return the expression of the override that gives a parameter its pattern, if one does."""
        texts = [(expression, expression.pattern) for expression, own in self._overrides if own]
        return _first(texts, parameter.module_names)

    def reason(self, parameter: NamedParameter) -> str:
        """Say why a parameter stays dense by the options, or cannot be sparse.

        Args:
            parameter: the parameter.

        Returns:
            The reason, or an empty string.
        """
        modules, problem = parameter.module_names, parameter.obstacle
        wanted = self._include is not None and _match(self._include, modules)
        if parameter.adapter and not wanted:
            return "an adapter (LoRA); include names it if it is meant"
        if parameter.axes is None:
            return problem
        if self._include is not None and not wanted:
            return "not in include"
        if any(_match([expression], modules) for expression, _ in self._overrides):
            return problem if _first(self._overrides, modules) else "dense by overrides"
        if _match(self._exclude, modules):
            return "excluded"
        ends = (self._ends[name] for name in parameter.names if name in self._ends)
        return problem or next(ends, "")

    # --- reading the options ----------------------------------------------------------------------

    def _modules(self, option: str, texts: Sequence[str]) -> list[re.Pattern[str]]:
        """Compile expressions for modules; note those that match none."""
        every = list(dict.fromkeys(each.module_name for each in self.parameters))
        compiled = []
        for text in texts:
            if (expression := self._compiled(option, text)) is None:
                continue
            compiled.append(expression)
            if not _match([expression], every):
                layers = [each.module_name for each in self.parameters if each.may_be_sparse]
                there = _some(name or "(the model itself)" for name in layers)
                self._problems.append(
                    f"{option}: {text!r} matches no layer's whole name; there are {there}"
                )
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

    def _dims(self, found: Sequence[NamedParameter], dims: Mapping[str, int]) -> Choices[int]:
        """Read the dimensions; note those that some parameter does not have."""
        named: Choices[int] = []
        for text, dim in dims.items():
            if (expression := self._compiled("dims", text)) is None:
                continue
            named.append((expression, dim))
            matches = [each for each in found if _match([expression], each.names)]
            if not matches:
                self._problems.append(
                    f"dims: {text!r} matches no parameter of two dimensions or more; "
                    f"there are {_some(each.name for each in found)}"
                )
            wrong = [p for p in matches if p.shape and dim not in range(len(p.shape))]
            for first in wrong[:1]:
                self._problems.append(
                    f"dims: {text!r}: {dim!r} is no dimension of {first.name} "
                    f"{list(first.shape)} (0 to {len(first.shape) - 1})"
                )
        return named

    def _compiled(self, option: str, text: str) -> re.Pattern[str] | None:
        try:
            return re.compile(text)
        except re.error as error:
            self._problems.append(f"{option}: {text!r} is not a regular expression: {error}")
            return None


def _ends(model: nn.Module, found: Sequence[NamedParameter]) -> dict[str, str]:
    """Name the weights of the first layer and the heads, with the reason."""
    adapters = {each.module_name for each in found if each.adapter}
    layers = [n for n, module in model.named_modules() if axes(module) and n not in adapters]
    last, first = heads(model, layers), first_layer(model)
    both = () if first is None else (first, f"{first}_reverse")  # the two directions of an RNN
    ends = {each.name: HEAD for each in found if each.module_name in last}
    return ends | {each.name: FIRST for each in found if each.name in both}


def _several(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _some(names: Iterable[str]) -> str:
    """Write a dozen of the names."""
    every = list(dict.fromkeys(names))
    return ", ".join(every[:12]) + (", ..." if len(every) > 12 else "")


def _match(expressions: Iterable[re.Pattern[str]], names: Sequence[str]) -> bool:
    return any(expression.fullmatch(name) for expression in expressions for name in names)


def _first(choices: Iterable[tuple[re.Pattern[str], T]], names: Sequence[str]) -> T | None:
    """Return the value of the first expression that matches."""
    return next((value for expression, value in choices if _match([expression], names)), None)
