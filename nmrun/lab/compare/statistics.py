"""A cell of a table: statistics over seeds, and whether two cells differ."""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Place = TypeVar("Place")
Floats = NDArray[np.float64]
LEVEL = 0.95
POWER = 0.8
FEWEST = 3  # pairs, for a test
BISECTIONS = 50  # of the interval in which a difference is searched for
DIGITS = 12  # beyond these, values differ by rounding


@dataclass(frozen=True)
class Cell:
    """Statistics over seeds. The mean is None without runs, the sample standard deviation for fewer
    than two. ``values`` are by seed, or by anything that pairs runs; ``without`` counts the runs
    that gave no value, by reason."""

    mean: float | None
    sd: float | None
    n: int
    without: dict[str, int]
    median: float | None = None
    values: dict[object, float] = field(default_factory=dict)

    def counted(self) -> str:
        """How many runs have a value, and how many have none, by reason: ``3, 2 failed``."""
        counts = [f"{count} {reason}" for reason, count in self.without.items()]
        if self.n:
            counts.insert(0, str(self.n))
        return ", ".join(counts)


def summarise(
    values: Sequence[float] | Mapping[object, float], without: Sequence[str] = ()
) -> Cell:
    """The cell of several runs: their values by seed or in order, and why the others have none."""
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


class Tested:
    """A difference with a p-value, or None for no test."""

    p: float | None

    @property
    def significant(self) -> bool:
        """At the level of 5 %, of the p-value as it stands (``holm`` corrects it)."""
        return self.p is not None and self.p < 1 - LEVEL


@dataclass(frozen=True)
class Difference(Tested):
    """Mean of the differences over ``n`` common seeds.

    ``spread`` is their standard deviation, at least the metric's grain. ``low`` to ``high`` is the
    95 % interval of Student's t: None where nothing is known of the spread. ``p`` is None for fewer
    than three seeds. ``least`` is the smallest true difference that the test would have found with
    a probability of 0.8 (infinite: none); :func:`holm` computes it.
    """

    mean: float
    n: int
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    least: float | None = None


class Estimate(NamedTuple):
    """Mean, spread, 95 % interval and p-value, each of shape (...)."""

    mean: Floats
    spread: Floats
    low: Floats
    high: Floats
    p: Floats


def grain(values: Iterable[float]) -> float:
    """The smallest difference between two unequal values of a metric; 0.0 if all are equal."""
    steps = np.diff(np.unique(_without_noise(np.array([*values], float))))
    return float(steps.min()) if len(steps) else 0.0


def student(gaps: Floats, grain: float | Floats) -> Estimate:
    """Student's paired t-test, two-sided, and interval (Student 1908), of ``gaps`` (..., n), n at
    least 2.

    The spread is at least ``grain``, the smallest step of the metric. Seeds that differ by the same
    number of test images show that the spread is less than an image, not that there is none.
    """
    n = gaps.shape[-1]
    mean, spread = gaps.mean(-1), np.maximum(gaps.std(-1, ddof=1), grain)
    error = spread / math.sqrt(n)
    half = t_quantile((1 + LEVEL) / 2, n - 1) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        p = t_two_sided(np.abs(mean) / error, n - 1)
    return Estimate(mean, spread, mean - half, mean + half, np.where(mean == 0, 1.0, p))


# scipy.stats has these too, but takes most of a second to import


def t_quantile(share: float, freedom: float) -> float:
    """The quantile of Student's t at the probability ``share``."""
    from scipy import special

    return float(special.stdtrit(freedom, share))


def t_two_sided(value: Floats, freedom: float) -> Floats:
    """The probability that Student's t is at least this large in size."""
    from scipy import special

    return np.asarray(2 * special.stdtr(freedom, -value))


def paired(ours: Cell, baseline: Cell, grain: float) -> Difference | None:
    """The first cell less the second, over the seeds that both have, with Student's paired test,
    two-sided; None where they share none."""
    common = [seed for seed in ours.values if seed in baseline.values]
    if not common:
        return None
    values = np.array([[cell.values[seed] for seed in common] for cell in (ours, baseline)], float)
    gaps, n = _without_noise(values[0] - values[1], np.abs(values).max()), len(common)
    if n == 1:
        return Difference(float(gaps[0]), n)
    t = student(gaps, grain)
    mean, spread = float(t.mean), float(t.spread)
    p = None if n < FEWEST else float(t.p)
    # all differences are equal, so nothing tells their spread
    if spread <= 10.0**-DIGITS * np.abs(values).max():
        return Difference(mean, n, p=None if p is None or gaps.any() else 1.0)
    return Difference(mean, n, spread, float(t.low), float(t.high), p)


def _without_noise(values: Floats, size: float | None = None) -> Floats:
    """Rounded to twelve digits of the largest (or of ``size``), so that ties are ties."""
    size = float(np.abs(values).max(initial=0.0) if size is None else size)
    return values.round(DIGITS - math.ceil(math.log10(size))) if size else values


def step_down(p: Floats) -> Floats:
    """p-values (..., m) corrected for their number m by Holm's step-down method (1979)."""
    order = p.argsort(-1)
    scaled = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    corrected = np.empty_like(p)
    np.put_along_axis(corrected, order, np.maximum.accumulate(scaled, -1).clip(max=1.0), -1)
    return corrected


def corrected(p_values: Sequence[float | None]) -> tuple[list[float | None], float]:
    """p-values corrected for their number by Holm's method, None where there is no test; and the
    level for the smallest, 0.05 divided by their number."""
    tested = [p for p in p_values if p is not None]
    by_test = iter(step_down(np.array(tested)).tolist())
    level = (1 - LEVEL) / max(1, len(tested))
    return [None if p is None else next(by_test) for p in p_values], level


def holm(differences: Mapping[Place, Difference]) -> dict[Place, Difference]:
    """The differences with p-values as of :func:`corrected`, and ``least`` at its level."""
    p_values, level = corrected([d.p for d in differences.values()])
    judged = dict(differences)
    for (place, d), p in zip(differences.items(), p_values, strict=True):
        if p is None:
            continue
        least = None if d.spread is None else d.spread * detectable(d.n, level)
        judged[place] = replace(d, p=p, least=least)
    return judged


def detectable(n: int, level: float) -> float:
    """The mean difference that a paired t-test of ``n`` pairs finds four times in five, in
    deviations.
    """
    return detectable_mean(n - 1, level) / math.sqrt(n)


@functools.cache
def detectable_mean(freedom: float, level: float) -> float:
    """The mean that a two-sided t-test finds with a probability of 0.8, in true standard errors.

    The noncentral t as a mean over the sample deviation's quantiles: scipy's own fails far out.
    """
    from scipy import special

    critical = t_quantile(1 - level / 2, freedom)
    shares = (np.arange(10_000) + 0.5) / 10_000
    # the quantiles of the chi-squared distribution
    bars = critical * np.sqrt(2 * special.gammaincinv(freedom / 2, shares) / freedom)
    low, high = 0.0, 4 * critical + 10
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        power = (special.ndtr(middle - bars) + special.ndtr(-bars - middle)).mean()
        low, high = (middle, high) if power < POWER else (low, middle)
    return high


def seeds_for_half(n: int, level: float) -> int:
    """The fewest pairs that detect a difference half as large as ``n`` pairs do."""
    half = detectable(n, level) / 2
    # four times as many halve the error of the mean, and the deviation is known better
    more = range(n, 4 * n + 1)
    return more[bisect.bisect_left(more, -half, key=lambda pairs: -detectable(pairs, level))]


def cell_value(cell: Cell, statistic: str, higher_is_better: bool) -> float | None:
    """A cell's ``mean``, ``median`` or ``best``."""
    if statistic == "best":
        return (max if higher_is_better else min)(cell.values.values(), default=None)
    return cell.median if statistic == "median" else cell.mean
