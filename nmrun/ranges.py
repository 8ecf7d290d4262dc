"""Which values a setting takes, in words and as a test."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nmrun.errors import raise_all
from nmrun.registry import did_you_mean


@dataclass(frozen=True)
class Check:
    """What a key takes, in words and as a test. ``convert`` gives equal values one form (1 and
    1.0), so that they are one run. ``why`` says what is wrong inside a value, where it can."""

    allowed: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    options: tuple[str, ...] = ()
    why: Callable[[Any], str] = lambda value: ""


@dataclass(frozen=True)
class Search:
    """Where ``nmrun tune`` looks for a value: among ``values``, or from ``low`` to ``high``."""

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(str, self.values))
        return f"{self.low:g} to {self.high:g}" + (" (log)" if self.log else "")


def among(*values: Any) -> Search:
    return Search(values)


def between(low: float, high: float) -> Search:
    """Look in an interval, uniformly."""
    return Search(low=low, high=high)


def log(low: float, high: float) -> Search:
    """Look in an interval, uniformly in the logarithm."""
    return Search(low=low, high=high, log=True)


def whole(low: int, high: float = math.inf, optional: bool = False) -> Check:
    """A whole number in a range, its ends included."""
    return Check(
        f"a whole number, {low} {'or more' if high == math.inf else f'to {high}'}"
        + (", or null" if optional else ""),
        lambda value: (optional and value is None) or (type(value) is int and low <= value <= high),
    )


def number(
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
    optional: bool = False,
) -> Check:
    """A finite number in a range. ``open_low``, ``open_high``: the end itself is not allowed."""

    def holds(value: Any) -> bool:
        if value is None or type(value) not in (int, float) or not math.isfinite(value):
            return optional and value is None
        return (low < value if open_low else low <= value) and (
            value < high if open_high else value <= high
        )

    span = f"{'above' if open_low else 'at least'} {low:g}"
    span += "" if math.isinf(high) else f" and {'below' if open_high else 'at most'} {high:g}"
    return Check(
        f"a number {span}" + (", or null" if optional else ""),
        holds,
        lambda v: None if v is None else float(v),
    )


def one_of(*options: str) -> Check:
    return Check(f"one of {', '.join(options)}", lambda value: value in options, options=options)


SWITCHES = (
    "auto",
    "auto_geometric",
    "variance_ratio",
    "gradient_norm",
)  # see nmrun.recipes.switch


def _is_switch(value: Any) -> bool:
    return value in SWITCHES or number(0, 1, open_low=True, open_high=True).holds(value)


INPUT_GRADIENTS = ("exact", "transposable", "double_prune", "mvue")  # see nmrun.sparsify
# see nmrun.fast.acceleration
ACCELERATION = "auto", "off", "force", "packed", "cusparselt"
FLAG = Check("true or false", lambda value: isinstance(value, bool))


def _no_text(value: Any) -> str:
    """Python reads bytes of a path that are no UTF-8 as halves of surrogate pairs, which no file
    takes."""
    odd = isinstance(value, str) and re.search("[\ud800-\udfff]", value)
    return "it has bytes that are not UTF-8" if odd else ""


TEXT = Check(
    "a text",
    lambda value: isinstance(value, str) and bool(value) and not _no_text(value),
    why=_no_text,
)
OPTIONAL_TEXT = Check(
    "a text, or null", lambda value: value is None or TEXT.holds(value), why=_no_text
)
# where the weights are that a recipe reads: the folder of a finished run, or a file. They have to be as
# their run left them, and its id is a part of the id of the run that reads them
WEIGHTS = Check("a text, or null", OPTIONAL_TEXT.holds, why=_no_text)
FRACTION = number(0, 1, open_high=True)
SWITCH = Check(
    f"{', '.join(SWITCHES)} or a fraction of all steps above 0 and below 1",
    _is_switch,
    options=SWITCHES,
)


def several(allowed: str, each: Check, fit: Callable[[list[Any]], bool] = lambda _: True) -> Check:
    """A list of what ``each`` takes, whose items ``fit`` together."""
    return Check(
        allowed,
        lambda value: isinstance(value, list) and all(map(each.holds, value)) and fit(value),
        lambda value: [each.convert(item) for item in value],
    )


SPAN = several("two numbers above 0", number(0, open_low=True), lambda ends: len(ends) == 2)


def plain(value: Any) -> Any:
    """A number of NumPy's or a tensor's as Python's, which ranges and saved states know."""
    return value.item() if getattr(value, "shape", None) == () else value


def checks(kind: Any) -> dict[str, Check | None]:
    """The range of each field that a dataclass is made with, from ``Annotated[int, whole(1)]``;
    None for one that takes anything."""
    hints = typing.get_type_hints(kind, include_extras=True)
    extras = {
        key.name: getattr(hints[key.name], "__metadata__", ())
        for key in dataclasses.fields(kind)
        if key.init
    }
    return {
        name: next((e for e in extra if isinstance(e, Check)), None)
        for name, extra in extras.items()
    }


def wrong_values(
    ranges: Mapping[str, Check | None], values: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str]]:
    """The values out of their ranges: a line for each, with the key after ``prefix``."""
    for key, allowed in ranges.items():
        if allowed is not None and key in values and not allowed.holds(values[key]):
            hint = did_you_mean(str(values[key]), allowed.options)
            value = value_text(values[key])
            why = "; ".join(filter(None, [f"it takes {allowed.allowed}", allowed.why(values[key])]))
            yield f"{prefix}{key}={value}: {why}{hint}", f"{prefix}{key}"


def converted(ranges: Mapping[str, Check | None], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that have a range, each in the one form of those that are equal to it."""
    return {
        key: allowed.convert(values[key])
        for key, allowed in ranges.items()
        if allowed is not None and key in values
    }


def check_values(ranges: Mapping[str, Check | None], values: Mapping[str, Any]) -> None:
    """Raise ConfigError with a line for each value out of its range."""
    raise_all(line for line, _ in wrong_values(ranges, values, ""))


def value_text(value: Any) -> str:
    """A value as a command line has it: ``null``, ``true``, ``0.001``, ``[32,64]``."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return value if isinstance(value, str) else str(value).replace(" ", "")


def total_steps_of(total: Any) -> int | None:
    """The steps of a whole run. Raises ConfigError for anything but a whole number or None."""
    steps: int | None = plain(total)
    check_values({"total_steps": whole(1, optional=True)}, {"total_steps": steps})
    return steps
