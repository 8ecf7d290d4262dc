"""A cell of a table: statistics over seeds, and whether two cells differ."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Place = TypeVar("Place")
Floats = NDArray[np.float64]
LEVEL = 0.95
POWER = 0.8
FEWEST = 3  # pairs, for a test
BISECTIONS = 50  # of the interval in which a difference is searched for
HEAVIEST = 4  # times the mean degrees of freedom of the samples: the prior's at most
NEWTON = 50  # steps at most; it takes five or six
DIGITS = 12  # beyond these, values differ by rounding


@dataclass(frozen=True)
class Cell:
    """Statistics over seeds. The mean is None without runs, the sample standard deviation for fewer
    than two. ``values`` are by seed, or by anything that pairs runs; ``without`` counts the runs
    that gave no value, by reason. ``failed`` has the seeds of those that failed and count in a
    difference."""

    mean: float | None
    sd: float | None
    n: int
    without: dict[str, int]
    median: float | None = None
    values: dict[object, float] = field(default_factory=dict)
    failed: tuple[object, ...] = ()

    def judged(self, higher_is_better: bool) -> dict[object, float]:
        """The values by seed that a difference is of. A failed seed has that of the worst other."""
        if not self.failed or not self.values:
            return self.values
        worst = (min if higher_is_better else max)(self.values.values())
        return self.values | dict.fromkeys(self.failed, worst)

    def counted(self) -> str:
        """How many runs have a value, and how many have none, by reason: ``3, 2 failed``."""
        counts = [f"{count} {reason}" for reason, count in self.without.items()]
        if self.n:
            counts.insert(0, str(self.n))
        return ", ".join(counts)


def summarise(
    values: Sequence[float] | Mapping[object, float],
    without: Sequence[str] = (),
    failed: Sequence[object] = (),
) -> Cell:
    """The cell of several runs: their values by seed or in order, why the others have none, and
    which seeds failed."""
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
        failed=tuple(failed),
    )


@dataclass(frozen=True)
class Difference:
    """The mean of the differences over the seeds that two cells have in common.

    ``n`` counts those that failed in neither cell. ``spread`` is their standard deviation, at least
    the metric's grain; None where nothing is known of it. :func:`moderated` shrinks it, and adds
    its degrees of ``freedom``, the 95 % interval from ``low`` to ``high``, and ``p``, which is None
    for fewer than three such seeds. ``least`` is the smallest true difference that the test would
    have found with a probability of 0.8; :func:`holm` computes it.
    """

    mean: float
    n: int
    spread: float | None = None
    freedom: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    least: float | None = None

    @property
    def error(self) -> float:
        """The standard error of the mean; 0.0 where nothing is known of it."""
        return (self.spread or 0.0) / math.sqrt(max(1, self.n))

    @property
    def significant(self) -> bool:
        """At the level of 5 %, of the p-value as it stands (``holm`` corrects it)."""
        return self.p is not None and self.p < 1 - LEVEL


def _without_noise(values: Floats, size: float) -> Floats:
    """Rounded to twelve digits of ``size``, so that ties are ties."""
    return values.round(DIGITS - math.ceil(math.log10(size))) if size else values


def grain(values: Iterable[float]) -> float:
    """The smallest difference between two unequal values of a metric; 0.0 if all are equal."""
    ordered = np.unique(np.array([*values], float))
    steps = np.diff(ordered)
    steps = steps[steps > 10.0**-DIGITS * np.abs(ordered[1:])]  # below, they differ by rounding
    return float(steps.min()) if len(steps) else 0.0


# scipy.stats has these too, but takes most of a second to import


def t_quantile(share: float, freedom: float) -> float:
    """The quantile of Student's t at the probability ``share``."""
    from scipy import special

    return float(special.stdtrit(freedom, share))


def t_two_sided(value: Floats, freedom: float | Floats) -> Floats:
    """The probability that Student's t is at least this large in size."""
    from scipy import special

    return np.asarray(2 * special.stdtr(freedom, -value))


def paired(
    ours: Cell, baseline: Cell, grain: float, higher_is_better: bool = True
) -> Difference | None:
    """The first cell less the second, over the seeds that both have; None where they share none.

    A failed seed counts in the mean, and is no observation of the spread. That is at least
    ``grain``, the smallest step of the metric: seeds that differ by the same number of test images
    show that the spread is less than an image, not that there is none.
    """
    first, second = (cell.judged(higher_is_better) for cell in (ours, baseline))
    common = [seed for seed in first if seed in second]
    if not common:
        return None
    values = np.array([[by_seed[seed] for seed in common] for by_seed in (first, second)], float)
    gaps = dict(zip(common, values[0] - values[1], strict=True))
    size = float(np.abs(values).max())
    return difference(gaps, {*ours.failed, *baseline.failed}, grain, size)


def difference(
    gaps: Mapping[object, float], failed: Collection[object], grain: float, size: float
) -> Difference:
    """The difference that has these ``gaps`` by seed, between values as large as ``size``."""
    every = _without_noise(np.array([*gaps.values()], float), size)
    seen = np.array([gap for seed, gap in zip(gaps, every, strict=True) if seed not in failed])
    if len(seen) < 2:
        return Difference(float(every.mean()), len(seen))
    spread = max(float(seen.std(ddof=1)), grain)
    # below, all differences are equal, so nothing tells their spread
    known = spread > 10.0**-DIGITS * size
    return Difference(float(every.mean()), len(seen), spread if known else None)


def moderated(differences: Mapping[Place, Difference]) -> dict[Place, Difference]:
    """The differences of one table and metric with moderated spreads, and what follows from these:
    interval and p-value of a two-sided t-test."""
    known = {place: d for place, d in differences.items() if d.spread is not None}
    if not known:
        return dict(differences)
    spreads = np.array([d.spread for d in known.values()])
    variance, freedom = moderate(spreads**2, np.array([d.n - 1.0 for d in known.values()]))
    judged = dict(differences)
    for (place, d), spread, free in zip(known.items(), np.sqrt(variance), freedom, strict=True):
        error = float(spread) / math.sqrt(d.n)
        half = t_quantile((1 + LEVEL) / 2, float(free)) * error
        p = float(t_two_sided(np.array(abs(d.mean) / error), free)) if d.n >= FEWEST else None
        judged[place] = replace(
            d,
            spread=float(spread),
            freedom=float(free),
            low=d.mean - half,
            high=d.mean + half,
            p=p,
        )
    return judged


def moderate(variances: Floats, freedom: Floats) -> tuple[Floats, Floats]:
    """Sample variances (..., m) with ``freedom`` (..., m), shrunk to each other; and the degrees of
    freedom that these have, at most those of all together.

    After Smyth 2004 (Linear models and empirical Bayes methods for assessing differential
    expression, section 6). A prior variance with d0 degrees of freedom counts beside each
    sample's. d0 is his moment estimate: infinite where variances do not differ by more than chance.
    Three things are on the safe side of his, and docs/statistics.md says what they prevent: the
    prior is the median of the variances, which a row of far larger ones does not move; d0 has a
    limit; and no variance becomes lower than it was found.
    """
    from scipy import special

    m = variances.shape[-1]
    if m == 1:  # there is nothing to shrink to
        return variances, np.broadcast_to(freedom, variances.shape)
    logs = np.log(variances) - special.digamma(freedom / 2) + np.log(freedom / 2)
    chance = special.polygamma(1, freedom / 2).mean(-1, keepdims=True)
    beyond = logs.var(-1, ddof=1, keepdims=True) - chance
    most = HEAVIEST * freedom.mean(-1, keepdims=True)
    prior = np.minimum(2 * trigamma_inverse(beyond), most)
    share = 1 / (1 + freedom / prior)
    middle = np.exp(np.median(logs, -1, keepdims=True))
    shrunk = share * middle + (1 - share) * variances
    return np.maximum(variances, shrunk), np.minimum(
        prior + freedom, freedom.sum(-1, keepdims=True)
    )


def trigamma_inverse(values: Floats) -> Floats:
    """The x with trigamma(x) = value, by Newton's method as in Smyth 2004, appendix; infinite for a
    value of 0 or less."""
    from scipy import special

    positive = np.where(values > 0, values, 1.0)
    x = 0.5 + 1 / positive
    for _ in range(NEWTON):
        trigamma = special.polygamma(1, x)
        change = trigamma * (1 - trigamma / positive) / special.polygamma(2, x)
        x = x + change
        if (np.abs(change) < 1e-10 * x).all():
            break
    return np.where(values > 0, x, np.inf)


def step_down(p: Floats) -> Floats:
    """p-values (..., m) corrected for their number m by Holm's step-down method (1979)."""
    order = p.argsort(-1)
    scaled = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    corrected = np.empty_like(p)
    np.put_along_axis(corrected, order, np.maximum.accumulate(scaled, -1).clip(max=1.0), -1)
    return corrected


def holm(differences: Mapping[Place, Difference]) -> dict[Place, Difference]:
    """The differences with p-values corrected for their number by Holm's method, and ``least`` at
    the level for the smallest of these: 0.05 divided by their number."""
    tested = {place: d for place, d in differences.items() if d.p is not None}
    level = (1 - LEVEL) / max(1, len(tested))
    judged = dict(differences)
    p_values = step_down(np.array([d.p for d in tested.values()], float))
    for (place, d), p in zip(tested.items(), p_values.tolist(), strict=True):
        least = None if d.freedom is None else d.error * detectable(d.freedom, level)
        judged[place] = replace(d, p=p, least=least)
    return judged


@functools.cache
def detectable(freedom: float, level: float) -> float:
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
