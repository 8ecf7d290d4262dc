"""Which values a setting takes, in words and as a test."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nmrun.errors import ConfigError, raise_all, refused
from nmrun.patterns import Pattern, PatternError
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


# --- keys of configs ------------------------------------------------------------------------------

START = "start"  # of trainer.distill: the network as it begins
UNITS = {"s": 1, "min": 60, "h": 3600}
AS_DENSE = ("flops:dense", "hardware_flops:dense")  # budgets


def seconds(time: Any) -> float | None:
    """The seconds of a time such as ``30s``, ``10min`` or ``1.5h``; None for what is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", time) if isinstance(time, str) else None
    return None if match is None else float(match[1]) * UNITS[match[2]]


def steps(number: Any) -> int | None:
    """The number of steps that ``200steps`` says; None for what says none."""
    match = re.fullmatch(r"([1-9]\d*)steps", number) if isinstance(number, str) else None
    return None if match is None else int(match[1])


def is_path(value: Any) -> bool:
    """Whether this is a dotted path, as of a class or function in a module."""
    return isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)+", value) is not None


def parsed(allowed: str, convert: Callable[[Any], Any]) -> Check:
    """What ``convert`` takes: it gives equal values one form, or raises a ValueError, which says what is
    wrong where it is a ConfigError."""

    def wrong(value: Any) -> ValueError | None:
        try:
            convert(value)
        except ValueError as error:
            return error
        return None

    def why(value: Any) -> str:
        error = wrong(value)
        return str(error) if isinstance(error, ConfigError) else ""

    return Check(allowed, lambda value: wrong(value) is None, convert, why=why)


def _expression(text: Any) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"{text!r} is no regular expression: {error}") from None
    return str(text)


def _expressions(value: Any) -> list[str] | None:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise ValueError
    return [_expression(text) for text in texts]


def _ratios(value: Any) -> dict[str, str] | None:
    if value is not None and not isinstance(value, dict):
        raise ValueError
    ratios = {}
    for text, ratio in (value or {}).items():
        with refused(f"{str(text)!r}: ", PatternError):
            ratios[_expression(str(text))] = (
                ratio if ratio == "dense" else str(Pattern.parse(ratio))
            )
    return ratios or None


def _pattern(value: Any, blocks: bool = False) -> str | None:
    if value is None:
        return None
    pattern = Pattern.parse(value)
    if pattern.v > 1 and not blocks:
        raise ValueError
    return str(pattern)


def _budget(value: Any) -> str | None:
    if value in (None, *AS_DENSE):
        return value
    unit, _, amount = str(value).partition(":")
    if unit not in ("flops", "hardware_flops", "seconds") or not 0 < float(amount) < math.inf:
        raise ValueError
    return f"{unit}:{float(amount)!r}"


def _how_several(value: Any) -> str:
    """How the values of 0..4, 0-4 or [0,1,2] are written."""
    if isinstance(value, list):
        return f"several have commas and no brackets: -m seed={','.join(map(str, value))}"
    ends = re.fullmatch(r"(\d+)(?:\.\.+|-|:)(\d+)", value) if isinstance(value, str) else None
    if ends is None:
        return ""
    return f"several have commas, or are a range: -m 'seed=range({ends[1]},{int(ends[2]) + 1})'"


SEED = Check(
    "a whole number, 0 or more, below 2^63",
    lambda value: type(value) is int and 0 <= value < 2**63,
    why=_how_several,
)
PATH = Check("the path of a file or folder", TEXT.holds)
CLASS = Check("the dotted path of a class", is_path)
ARGUMENTS = Check(
    "null or keyword arguments, {NAME: VALUE}", lambda value: isinstance(value, dict | None)
)
EXPRESSIONS = parsed("a regular expression or a list of them", _expressions)
RATIOS = parsed(
    "null or regular expressions with a ratio (in YAML in quotes) or dense for each, as in "
    "'sparsity.overrides={inner.1: 1:8, head: dense}'",
    _ratios,
)
PATTERN = parsed("an N:M pattern such as 2:4 (in quotes where it is YAML), or null", _pattern)
ACTIVATIONS = parsed(
    "an N:M or V:N:M pattern such as 2:4 or 64:2:8 (in quotes where it is YAML), or null",
    partial(_pattern, blocks=True),
)
BUDGET = parsed(
    "flops:dense, flops:<number above 0> such as flops:1e12, hardware_flops:dense, "
    "hardware_flops:<number above 0>, seconds:<number above 0> such as seconds:600, or null",
    _budget,
)
CHECKPOINTS = Check(
    "a time above 0 such as 30s, 10min or 2h, or a whole number of epochs, 1 or more",
    lambda value: whole(1).holds(value) or bool(seconds(value)),
)
EVALUATIONS = Check(
    "a whole number of epochs, 1 or more, or of steps such as 200steps",
    lambda value: whole(1).holds(value) or steps(value) is not None,
)
DECAYED = Check(
    "all, matrices, or null for what is usual with the model",
    lambda value: value in (None, "all", "matrices"),
    options=("all", "matrices"),
)
BETAS = several("two numbers from 0 to below 1", FRACTION, lambda rates: len(rates) == 2)
MILESTONES = several(
    "rising fractions of all steps, above 0 and below 1",
    number(0, 1, open_low=True, open_high=True),
    lambda fractions: fractions == sorted(set(fractions)),
)
WIDTHS = several(
    "a list of at least two whole numbers, 1 or more", whole(1), lambda widths: len(widths) >= 2
)
TAGS = several("a list of texts", TEXT)
LOGGERS = several("a list of tensorboard and mlflow", one_of("tensorboard", "mlflow"))
