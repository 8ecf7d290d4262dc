"""How often tables with a baseline claim a difference that is not there, and find one that is.

``python benchmarks/verdicts.py`` writes benchmarks/results/verdicts.csv in half a minute of one core. A line is
a kind of table, of so many rows against a baseline, columns and seeds, with the share of 4,000
tables that have a star though no row differs (``false alarms``), and how often the first cell has
one if it is better by two standard deviations of its runs (``power``). ``paired`` is the t-test of each
cell by itself, ``smyth`` that with the moderated variance as published, ``nmrun`` what tables print.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nmrun.lab.compare.statistics import (
    Cell,
    moderate,
    moderated,
    paired,
    step_down,
    summarise,
    t_two_sided,
    trigamma_inverse,
)

Floats = NDArray[np.float64]
OUT = Path(__file__).parent / "results/verdicts.csv"
TABLES = 4_000
SHARED = 0.5  # of a run's variance is of its seed: runs of one seed have it in common
EFFECT = 2.0  # standard deviations of its runs


@dataclass(frozen=True)
class Kind:
    """``deviations`` of a run by row, the baseline first, repeated; ``tails``: degrees of freedom of
    Student's t, of which runs are; ``failed``: the share of runs."""

    name: str
    rows: int = 7
    columns: int = 4
    seeds: int = 5
    deviations: tuple[float, ...] = (1.0,)
    cells: float = 0.0
    tails: float = np.inf
    failed: float = 0.0


KINDS = (
    Kind("equal spreads"),
    Kind("equal spreads", seeds=3),
    Kind("equal spreads", seeds=10),
    Kind("equal spreads", rows=2, columns=1),
    Kind("equal spreads", rows=13),
    Kind("rows' spreads 1, 0.5, 1, 2", deviations=(1, 0.5, 1, 2)),
    Kind("rows' spreads 1, 0.5, 1, 2", seeds=10, deviations=(1, 0.5, 1, 2)),
    Kind("baseline's spread twice the others'", deviations=(2, *[1] * 7)),
    Kind("one row's spread three times the others'", deviations=(1, 3, *[1] * 6)),
    Kind("another row's spread a hundred times the others'", deviations=(*[1] * 7, 100)),
    Kind("each cell's spread its own, by a factor of 1.8", cells=0.6),
    Kind("tails of a t with 4 degrees of freedom", tails=4),
    Kind("a run in 20 failed", failed=0.05),
    Kind("rows' spreads 1, 0.5, 1, 2", seeds=4, deviations=(1, 0.5, 1, 2)),
    Kind("a run in 5 failed", failed=0.2),
    Kind("a run in 20 failed, rows' spreads 1, 0.5, 1, 2", deviations=(1, 0.5, 1, 2), failed=0.05),
)


def drawn(kind: Kind, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Runs (table, row, column, seed), the baseline first, that do not differ but by chance; and
    the deviation of each cell's runs."""
    shape = (TABLES, kind.rows + 1, kind.columns, kind.seeds)
    own = rng.standard_t(kind.tails, shape) if kind.tails < np.inf else rng.standard_normal(shape)
    own /= np.sqrt(kind.tails / (kind.tails - 2)) if kind.tails < np.inf else 1.0
    common = rng.standard_normal((TABLES, 1, *shape[2:]))
    rows = np.resize(kind.deviations, kind.rows + 1)[:, None]
    spread = rows * np.exp(kind.cells * rng.standard_normal(shape[:-1]))
    return (np.sqrt(SHARED) * common + np.sqrt(1 - SHARED) * own) * spread[..., None], spread


def tests(runs: Floats) -> dict[str, Floats]:
    """The p-values (table, cell) of tables without failed runs, by test."""
    gaps = (runs[:, 1:] - runs[:, :1]).reshape(len(runs), -1, runs.shape[-1])
    n = gaps.shape[-1]
    freedom, variance = np.full(gaps.shape[1], n - 1.0), gaps.var(-1, ddof=1)
    spreads = {"paired": (variance, freedom), "smyth": smyth(variance, n - 1)}
    spreads["nmrun"] = moderate(variance, freedom)
    return {
        name: t_two_sided(np.abs(gaps.mean(-1)) / np.sqrt(of_one / n), free)
        for name, (of_one, free) in spreads.items()
    }


def smyth(variance: Floats, freedom: float) -> tuple[Floats, Floats]:
    """The moderated variance and its degrees of freedom as in Smyth 2004."""
    from scipy import special

    logs = np.log(variance) - special.digamma(freedom / 2) + np.log(freedom / 2)
    beyond = logs.var(-1, ddof=1, keepdims=True) - special.polygamma(1, freedom / 2)
    prior = np.minimum(2 * trigamma_inverse(beyond), 1e6)
    of_prior = np.exp(logs.mean(-1, keepdims=True) + special.digamma(prior / 2)) * 2 / prior
    moderate = (prior * of_prior + freedom * variance) / (prior + freedom)
    return moderate, np.minimum(prior + freedom, variance.shape[-1] * freedom)


def tests_of_cells(runs: Floats, failed: NDArray[np.bool_]) -> dict[str, Floats]:
    """The same where some runs failed, as tables come to them."""
    p: dict[str, list[list[float]]] = {"paired": [], "nmrun": []}
    for values, without in zip(runs, failed, strict=True):
        cells = [
            [cell(*pair) for pair in zip(*row, strict=True)]
            for row in zip(values, without, strict=True)
        ]
        base, *rows = cells
        gaps = {
            (i, j): gap
            for i, row in enumerate(rows)
            for j, (ours, theirs) in enumerate(zip(row, base, strict=True))
            if (gap := paired(ours, theirs, 0.0)) is not None
        }
        alone = {place: moderated({place: gap})[place].p for place, gap in gaps.items()}
        together = {place: gap.p for place, gap in moderated(gaps).items()}
        for name, found in (("paired", alone), ("nmrun", together)):
            every = [found.get((i, j)) for i in range(len(rows)) for j in range(len(base))]
            p[name].append([1.0 if each is None else each for each in every])
    return {name: np.array(each) for name, each in p.items()}


def cell(values: Floats, failed: NDArray[np.bool_]) -> Cell:
    seeds = np.arange(len(values))
    whole: dict[object, float] = {int(seed): float(values[seed]) for seed in seeds[~failed]}
    return summarise(whole, ["failed"] * int(failed.sum()), [int(seed) for seed in seeds[failed]])


def stars(kind: Kind, effect: float) -> dict[str, NDArray[np.bool_]]:
    """Whether each cell (table, cell) has a star, by test; the first row is better by ``effect``."""
    rng = np.random.default_rng(0)
    runs, spread = drawn(kind, rng)
    runs[:, 1] += effect * spread[:, 1, :, None]
    if kind.failed:
        some = slice(1_000)
        failed = rng.random(runs.shape) < kind.failed
        p = tests_of_cells(runs[some], failed[some])
    else:
        p = tests(runs)
    return {name: step_down(each) < 0.05 for name, each in p.items()}


def main() -> None:
    names = ("paired", "smyth", "nmrun")
    head = ["table", "rows", "columns", "seeds"]
    head += [f"{what}, {name}" for what in ("false alarms", "power") for name in names]
    lines = []
    for kind in KINDS:
        alarms, found = stars(kind, 0.0), stars(kind, EFFECT)
        shares = [f"{alarms[name].any(-1).mean():.3f}" if name in alarms else "" for name in names]
        shares += [f"{found[name][:, 0].mean():.2f}" if name in found else "" for name in names]
        lines.append([kind.name, kind.rows, kind.columns, kind.seeds, *shares])
        print(*lines[-1])
    with OUT.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *lines])


if __name__ == "__main__":
    main()
