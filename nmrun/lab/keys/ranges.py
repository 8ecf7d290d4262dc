"""The ranges of the laboratory's keys, beside those of ``nmrun.ranges`` that recipes have too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from nmrun.errors import ConfigError, refused
from nmrun.patterns import Pattern, PatternError
from nmrun.ranges import FRACTION, TEXT, Check, number, one_of, several, whole

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
