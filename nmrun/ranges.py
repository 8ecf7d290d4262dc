"""Which values a setting takes, in words and as a test: for the config's keys and for the recipes'
hyperparameters alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nmrun.patterns import Pattern, PatternError
from nmrun.registry import did_you_mean


@dataclass(frozen=True)
class Check:
    """What a key takes, in words and as a test; ``convert`` gives equal values one form (1 and
    1.0), so that they are one run.
    """

    allowed: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    options: tuple[str, ...] = ()


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
    """Look among these values."""
    return Search(values)


def between(low: float, high: float) -> Search:
    """Look in an interval, uniformly."""
    return Search(low=low, high=high)


def log(low: float, high: float) -> Search:
    """Look in an interval, uniformly in the logarithm."""
    return Search(low=low, high=high, log=True)


def whole(low: int, high: float = math.inf, optional: bool = False) -> Check:
    """A whole number in a range.

    Args:
        low, high: the ends, allowed; no upper end by default.
        optional: whether null is allowed too.
    """
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
    """A finite number in a range.

    Args:
        low, high: the ends; no upper end by default.
        open_low, open_high: whether the end itself is not allowed.
        optional: whether null is allowed too.
    """

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


UNITS = {"s": 1, "min": 60, "h": 3600}


def seconds(time: Any) -> float | None:
    """The seconds of a time such as ``30s``, ``10min`` or ``1.5h``; None for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", time) if isinstance(time, str) else None
    return None if found is None else float(found[1]) * UNITS[found[2]]


def steps(number: Any) -> int | None:
    """The number of steps that ``200steps`` says; None for what says none."""
    found = re.fullmatch(r"([1-9]\d*)steps", number) if isinstance(number, str) else None
    return None if found is None else int(found[1])


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


def _is_expressions(value: Any) -> bool:
    try:
        return value is None or all(
            re.compile(item) for item in ([value] if isinstance(value, str) else value)
        )
    except (re.error, TypeError):
        return False


def _is_pattern(value: Any, blocks: bool = False) -> bool:
    try:
        return value is None or Pattern.parse(value).v == 1 or blocks
    except PatternError:
        return False


def _is_ratios(value: Any) -> bool:
    try:
        return value is None or all(
            re.compile(str(k)) and (v == "dense" or Pattern.parse(v)) for k, v in value.items()
        )
    except (re.error, AttributeError, ValueError, TypeError):
        return False


def _is_budget(value: Any) -> bool:
    if value in (None, "flops:dense"):
        return True
    try:
        unit, _, amount = value.partition(":")
        return unit in ("flops", "seconds") and 0 < float(amount) < math.inf
    except (AttributeError, ValueError):
        return False


def _plain_budget(value: str | None) -> str | None:
    if value is None or value == "flops:dense":
        return value
    unit, _, amount = value.partition(":")
    return f"{unit}:{float(amount)!r}"


INPUT_GRADIENTS = ("exact", "transposable", "double_prune", "mvue")  # see nmrun.sparsify
# see nmrun.fast.acceleration
ACCELERATION = (
    "auto",
    "off",
    "force",
    "packed",
    "cusparselt",
    "cutlass",
    "one_pass",
    "cusparselt_fp8",
)
FLAG = Check("true or false", lambda value: isinstance(value, bool))
COMPILE = Check(
    "true, false, reduce-overhead (CUDA graphs) or max-autotune",
    lambda value: isinstance(value, bool) or value in ("reduce-overhead", "max-autotune"),
)
TEXT = Check("a text", lambda value: isinstance(value, str) and bool(value))
OPTIONAL_TEXT = Check("a text, or null", lambda value: value is None or TEXT.holds(value))
PATH = Check("the path of a file or folder", TEXT.holds)
FRACTION = number(0, 1, open_high=True)
SWITCH = Check(
    f"{', '.join(SWITCHES)} or a fraction of all steps above 0 and below 1",
    _is_switch,
    options=SWITCHES,
)
DECAY = Check(
    "a number at least 0, or auto (t_sr_ste)",
    lambda value: value == "auto" or number(0).holds(value),
    lambda value: value if value == "auto" else float(value),
)
LOGGERS = Check(
    "a list of tensorboard and mlflow",
    lambda value: isinstance(value, list) and set(map(str, value)) <= {"tensorboard", "mlflow"},
)
TAGS = Check(
    "a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.holds, value))
)
EXPRESSIONS = Check(
    "a regular expression or a list of them",
    _is_expressions,
    lambda value: [value] if isinstance(value, str) else value,
)
RATIOS = Check(
    "null or regular expressions with a ratio (in YAML in quotes) or dense for each, as in "
    "'sparsity.overrides={inner.1: 1:8, head: dense}'",
    _is_ratios,
    lambda value: (
        (value and {str(k): v if v == "dense" else str(Pattern.parse(v)) for k, v in value.items()})
        or None
    ),
)
DECAYED = Check(
    "all, matrices, or null for what is usual with the model",
    lambda value: value in (None, "all", "matrices"),
    options=("all", "matrices"),
)
BETAS = Check(
    "two numbers from 0 to below 1",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(FRACTION.holds, value)),
    lambda value: [float(item) for item in value],
)
SPAN = Check(
    "two numbers above 0",
    lambda value: (
        isinstance(value, list)
        and len(value) == 2
        and all(map(number(0, open_low=True).holds, value))
    ),
    lambda value: [float(item) for item in value],
)
PATTERN = Check(
    "an N:M pattern such as 2:4 (in quotes where it is YAML), or null",
    _is_pattern,
    lambda value: None if value is None else str(Pattern.parse(value)),
)
ACTIVATIONS = Check(
    "an N:M or V:N:M pattern such as 2:4 or 64:2:8 (in quotes where it is YAML), or null",
    lambda value: _is_pattern(value, blocks=True),
    lambda value: None if value is None else str(Pattern.parse(value)),
)
BUDGET = Check(
    "flops:dense, flops:<number above 0> such as flops:1e12, seconds:<number above 0> such as "
    "seconds:600, or null",
    _is_budget,
    _plain_budget,
)
CHECKPOINTS = Check(
    "a time above 0 such as 30s, 10min or 2h, or a whole number of epochs, 1 or more",
    lambda value: whole(1).holds(value) or bool(seconds(value)),
)
EVALUATIONS = Check(
    "a whole number of epochs, 1 or more, or of steps such as 200steps",
    lambda value: whole(1).holds(value) or steps(value) is not None,
)
WIDTHS = Check(
    "a list of at least two whole numbers, 1 or more",
    lambda value: isinstance(value, list) and len(value) >= 2 and all(map(whole(1).holds, value)),
)
LEVELS = Check(
    "a list of five whole numbers, 1 or more",
    lambda value: isinstance(value, list) and len(value) == 5 and all(map(whole(1).holds, value)),
)
SIDES = Check(
    "null or height and width, multiples of 8 such as [368,496]",
    lambda value: (
        value is None
        or (
            isinstance(value, list)
            and len(value) == 2
            and all(whole(8).holds(side) and side % 8 == 0 for side in value)
        )
    ),
)
SEED = Check(
    "a whole number, 0 or more, below 2^63",
    lambda value: type(value) is int and 0 <= value < 2**63,
)
SEEDS = Check(
    "null or a list of different whole numbers, 0 or more, such as [0,1,2]",
    lambda value: (
        value is None
        or (
            isinstance(value, list)
            and bool(value)
            and all(map(SEED.holds, value))
            and len(set(value)) == len(value)
        )
    ),
)


@functools.cache
def checks(kind: Any) -> dict[str, Check | None]:
    """The range of each key of a class; None for a key that takes anything.

    Args:
        kind: a dataclass whose ranges are written ``Annotated[int, whole(1)]``.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        key.name: next(iter(getattr(hints[key.name], "__metadata__", ())), None)
        for key in dataclasses.fields(kind)
    }


def wrong_values(
    ranges: Mapping[str, Check | None], given: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str]]:
    """Find values out of their ranges.

    Args:
        ranges: by key; None for any value.
        given: values by key.
        prefix: of the keys, for the problem.

    Returns:
        Each problem, with the key that is wrong.
    """
    for key, allowed in ranges.items():
        if allowed is not None and key in given and not allowed.holds(given[key]):
            hint = did_you_mean(str(given[key]), allowed.options)
            value = shown(given[key])
            yield f"{prefix}{key}={value}: it takes {allowed.allowed}{hint}", f"{prefix}{key}"


def shown(value: Any) -> str:
    """A value as a command line has it: ``null``, ``true``, ``0.001``, ``[32,64]``."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return value if isinstance(value, str) else str(value).replace(" ", "")
