"""A cell of a table: what several seeds say together, and whether two cells differ."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

Place = TypeVar("Place")
RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Cell:
    """Mean and median over ``n`` runs (None for no run), sample standard deviation (None for fewer
    than two), the runs' ``values`` by seed (by anything that pairs runs), and how many runs gave no
    value, by reason.
    """

    mean: float | None
    sd: float | None
    n: int
    without: dict[str, int]
    median: float | None = None
    values: dict[object, float] = field(default_factory=dict)


def summarise(
    values: Sequence[float] | Mapping[object, float], without: Sequence[str] = ()
) -> Cell:
    """``values`` of the runs that have one; ``without``: why each of the others has none. The
    deviation divides by n - 1.
    """
    by_seed: dict[object, float] = dict(
        values.items() if isinstance(values, Mapping) else enumerate(values)
    )
    numbers, n = list(by_seed.values()), len(by_seed)
    return Cell(
        mean=statistics.fmean(numbers) if n else None,
        sd=statistics.stdev(numbers) if n > 1 else None,
        n=n,
        without=dict(sorted(Counter(without).items())),
        median=statistics.median(numbers) if n else None,
        values=by_seed,
    )


@dataclass(frozen=True)
class Difference:
    """Mean of the differences over ``n`` common seeds, its bootstrap interval (95 %, percentiles),
    and the p-value, None for n = 1.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    n: int

    @property
    def significant(self) -> bool:
        """At the level of 5 %, of the p-value as it stands (``holm`` corrects it)."""
        return self.p is not None and self.p < 1 - LEVEL


def paired(ours: Cell, baseline: Cell, test: str = "t") -> Difference | None:
    """Compare two cells over the seeds that both have; None where they share none.

    ``test``: ``"t"``, Student's paired test, two-sided, or ``"wilcoxon"``, the signed-rank test
    (exact up to n = 50 without ties; it cannot be below 0.0625 for five seeds). Equal differences
    have no spread to judge by: p is 1 where all are 0, else 0.
    """
    common = [seed for seed in ours.values if seed in baseline.values]
    if not common:
        return None
    gaps = [ours.values[seed] - baseline.values[seed] for seed in common]
    mean = statistics.fmean(gaps)
    if len(gaps) == 1:
        return Difference(mean, None, None, None, 1)
    import numpy as np

    drawn = np.random.default_rng(0).choice(gaps, (RESAMPLES, len(gaps))).mean(1)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(mean, float(low), float(high), _p(gaps, test), len(gaps))


def _p(gaps: Sequence[float], test: str) -> float:
    from scipy import stats

    if not any(gaps):
        return 1.0
    if test == "wilcoxon":
        return float(stats.wilcoxon(gaps).pvalue)
    spread = statistics.stdev(gaps)
    if math.isclose(spread, 0.0, abs_tol=1e-12 * abs(gaps[0])):
        return 0.0
    return float(stats.ttest_1samp(gaps, 0.0).pvalue)


def holm(differences: Mapping[Place, Difference]) -> dict[Place, Difference]:
    """The same with p-values corrected for their number, by Holm's step-down method (1979)."""
    tested = [(d.p, place) for place, d in differences.items() if d.p is not None]
    corrected, least, left = dict(differences), 0.0, len(tested)
    for p, place in sorted(tested, key=lambda pair: pair[0]):
        least = max(least, min(1.0, p * left))
        corrected[place], left = replace(differences[place], p=least), left - 1
    return corrected


def shown(cell: Cell, statistic: str, higher_is_better: bool) -> float | None:
    """A cell's ``mean``, ``median`` or ``best``."""
    if statistic == "best":
        return _best(cell.values.values(), higher_is_better)
    return cell.median if statistic == "median" else cell.mean


def _best(values: Iterable[float], higher_is_better: bool) -> float | None:
    return (max if higher_is_better else min)(values, default=None)
