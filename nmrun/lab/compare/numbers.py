"""Numbers as a reader sees them: their unit, the digits that their spread leaves, a minus sign."""

from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"
NEGLIGIBLE = 1e-6  # a spread that is a smaller share of the value is rounding
THOUSANDS = " kMGTPEZY"  # of FLOPs


def scale(metric: str) -> float:
    """Accuracies are shown in percent."""
    return 100.0 if "accuracy" in metric else 1.0


def unit(metric: str, difference: bool = False) -> str:
    """What ``printed`` counts in: ``%``, ``percentage points``, ``s``, ``FLOPs``, or nothing."""
    if "accuracy" in metric:
        return "percentage points" if difference else "%"
    return "s" if metric == "seconds" else "FLOPs" if metric.startswith("flops/") else ""


def labelled(metric: str) -> str:
    """A metric with its unit, if that is not in its name: ``test/accuracy in %``."""
    return f"{metric} in %" if unit(metric) == "%" else metric


def deviates(value: float, spread: float | None) -> bool:
    """Whether a spread is more than rounding."""
    return spread is not None and spread > NEGLIGIBLE * abs(value)


def places(value: float, metric: str, spread: float | None = None) -> int:
    """How many digits after the point are shown; -2: whole hundreds.

    The last digit is the first one of the spread, or its second if the first is a 1. Where there is
    no spread, accuracies have one decimal and everything else four significant digits.

    Args:
        value: in the metric's own unit: accuracies from 0 to 1.
        spread: the value's standard deviation, or half an interval, in the same unit.
    """
    value, spread = abs(value) * scale(metric), (spread or 0.0) * scale(metric)
    if deviates(value, spread):
        mantissa, exponent = f"{spread:.1e}".split("e")
        return int(float(mantissa) < 2) - int(exponent)
    if scale(metric) == 100.0:
        return 1
    after = 3 - (math.floor(math.log10(value)) if value else 0)
    return after if value >= 1e8 else max(0, after)


def printed(value: float, metric: str, at: int | None = None) -> str:
    """In the unit of ``unit``, with a real minus sign.

    Args:
        at: digits after the point, as ``places`` has them; None: those of a value without spread,
            zeros at the end left out where it is no percentage. FLOPs have a letter (``34.9G``),
            other numbers of nine digits and more an exponent.
    """
    value *= scale(metric)
    digits = places(value / scale(metric), metric) if at is None else at
    value = round(value, digits) + 0.0  # no -0.0
    if unit(metric) == "FLOPs" and abs(value) >= 1e3:
        power = min(int(math.log10(abs(value)) // 3), len(THOUSANDS) - 1)
        text = f"{value / 1000**power:.{max(0, digits + 3 * power)}f}"
        text = (text.rstrip("0").rstrip(".") if at is None and "." in text else text) + (
            THOUSANDS[power]
        )
    elif abs(value) >= 1e8:
        text = f"{value:.{max(0, math.floor(math.log10(abs(value))) + digits)}e}"
    else:
        text = f"{value:.{max(0, digits)}f}"
        if at is None and scale(metric) == 1.0 and "." in text:
            text = text.rstrip("0").rstrip(".")
    return text.replace("-", MINUS)


def signed(value: float, metric: str, at: int | None = None) -> str:
    """As ``printed``, with a plus sign in front of what is above 0."""
    text = printed(value, metric, at)
    return f"+{text}" if value > 0 and any(digit in text for digit in "123456789") else text


def interval(
    value: float,
    low: float | None,
    high: float | None,
    metric: str,
    error: float | None,
    digits: int | None = None,
) -> str:
    """A difference with its interval, ``-0.5 [-0.9, -0.1]``, all in the metric's own unit and with
    the digits of the standard ``error``, or with ``digits`` after the point.
    """
    at = places(value, metric, error) if digits is None else digits
    ends = [signed(end, metric, at) for end in (low, high) if end is not None]
    return signed(value, metric, at) + (f" [{', '.join(ends)}]" if ends else "")


def p_value(p: float | None) -> str:
    """`` p=0.012``, `` p<0.001``, or nothing for None."""
    return "" if p is None else " p<0.001" if p < 0.001 else f" p={p:.2g}"
