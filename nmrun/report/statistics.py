"""A cell of a table: what several seeds say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOWER_IS_BETTER = ("loss", "perplexity", "error", "seconds", "nll")


@dataclass(frozen=True)
class Cell:
    """Mean, sample standard deviation (None for a single run), number of finished runs, and how many did not finish, by status."""

    mean: float | None
    sd: float | None
    n: int
    unfinished: dict[str, int]


def summarise(values: Sequence[float], statuses: Sequence[str]) -> Cell:
    """``values`` of the finished runs; ``statuses`` of all. The deviation is that of a sample (n - 1)."""
    numbers = np.asarray(values, dtype=np.float64)
    unfinished = {status: list(statuses).count(status) for status in sorted(set(statuses) - {"finished"})}
    if not len(numbers):
        return Cell(None, None, 0, unfinished)
    return Cell(float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None, len(numbers), unfinished)


def higher_is_better(metric: str) -> bool:
    """False for losses, perplexities, errors and times, by name."""
    return not any(word in metric.lower() for word in LOWER_IS_BETTER)
