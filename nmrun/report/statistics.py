"""A cell of a table: what several seeds say together."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """Mean over ``n`` runs (None for no run), sample standard deviation (None for fewer than two), and how many runs gave no value, by reason."""

    mean: float | None
    sd: float | None
    n: int
    without: dict[str, int]


def summarise(values: Sequence[float], without: Sequence[str] = ()) -> Cell:
    """``values`` of the runs that have one; ``without``: why each of the others has none. The deviation divides by n - 1."""
    n = len(values)
    mean = statistics.fmean(values) if n else None
    return Cell(mean, statistics.stdev(values) if n > 1 else None, n, dict(sorted(Counter(without).items())))
