"""Which values the keys of a config take, beside those of ``nmrun.ranges``."""

from __future__ import annotations

import math
import re
from typing import Any

from nmrun.patterns import Pattern, PatternError
from nmrun.ranges import FRACTION, TEXT, Check, number, whole

UNITS = {"s": 1, "min": 60, "h": 3600}
START = "start"  # of trainer.distill: the network as it begins


def seconds(time: Any) -> float | None:
    """The seconds of a time such as ``30s``, ``10min`` or ``1.5h``; None for what is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", time) if isinstance(time, str) else None
    return None if match is None else float(match[1]) * UNITS[match[2]]


def steps(number: Any) -> int | None:
    """The number of steps that ``200steps`` says; None for what says none."""
    match = re.fullmatch(r"([1-9]\d*)steps", number) if isinstance(number, str) else None
    return None if match is None else int(match[1])


ARGUMENTS = Check(
    "null or keyword arguments such as {drop_path_rate: 0.1}",
    lambda value: isinstance(value, dict | None),
)
CLASS = Check(
    "the dotted path of a class, such as torch.optim.NAdam",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"\w+(\.\w+)+", value)),
)
MILESTONES = Check(
    "rising fractions of all steps, above 0 and below 1",
    lambda value: (
        isinstance(value, list)
        and all(map(number(0, 1, open_low=True, open_high=True).holds, value))
        and value == sorted(set(value))
    ),
    lambda value: [float(item) for item in value],
)
PATH = Check("the path of a file or folder", TEXT.holds)


def no_expression(text: str) -> str:
    """Why a text is no regular expression; empty where it is one."""
    try:
        re.compile(text)
    except re.error as error:
        return f"{text!r} is no regular expression: {error}"
    return ""


def _is_expressions(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return value is None or (
        all(isinstance(text, str) for text in texts) and not _wrong_expression(value)
    )


def _wrong_expression(value: Any) -> str:
    texts = value if isinstance(value, list) else [value]
    return next(filter(None, (no_expression(text) for text in texts if isinstance(text, str))), "")


def _is_pattern(value: Any, blocks: bool = False) -> bool:
    try:
        return value is None or Pattern.parse(value).v == 1 or blocks
    except PatternError:
        return False


def _is_ratios(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not _wrong_ratio(value))


def _wrong_ratio(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    for text, ratio in value.items():
        if why := no_expression(str(text)):
            return why
        try:
            ratio == "dense" or Pattern.parse(ratio)
        except PatternError as error:
            return f"{text!r}: {error}"
    return ""


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


COMPILE = Check(
    "true, false, reduce-overhead (CUDA graphs) or max-autotune",
    lambda value: isinstance(value, bool) or value in ("reduce-overhead", "max-autotune"),
)


INCHES = number(1, 40)
LIMITS = Check("LOW,HIGH, such as 90,100", lambda ends: len(ends) == 2 and ends[0] < ends[1])
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
    why=_wrong_expression,
)


RATIOS = Check(
    "null or regular expressions with a ratio (in YAML in quotes) or dense for each, as in "
    "'sparsity.overrides={inner.1: 1:8, head: dense}'",
    _is_ratios,
    lambda value: (
        (value and {str(k): v if v == "dense" else str(Pattern.parse(v)) for k, v in value.items()})
        or None
    ),
    why=_wrong_ratio,
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


def _several(value: Any) -> str:
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
    why=_several,
)
