"""What tables with a baseline say, computed a second time: pandas, scipy and the runs' CSV alone."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Hashable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy import optimize, special, stats

RATIO = "sparsity"
ROOT = Path(__file__).parent.parent


class Verdict(NamedTuple):
    mean: float
    low: float | None
    high: float | None
    p: float | None  # by Holm's method
    spread: float | None


class Gaps(NamedTuple):
    """Differences of seeds that failed nowhere, those of all seeds, and the metric's step."""

    seen: list[float]
    every: list[float]
    step: float = 0.0


def prior_of(variances: Sequence[float], freedoms: Sequence[int]) -> tuple[float, float]:
    """Smyth's moment estimate (2004, section 6) with scipy's root finding in place of his Newton
    steps: the prior, the median of the variances, and its degrees of freedom."""
    logs = [
        math.log(v) - special.digamma(f / 2) + math.log(f / 2)
        for v, f in zip(variances, freedoms, strict=True)
    ]
    chance = statistics.fmean(float(special.polygamma(1, f / 2)) for f in freedoms)
    beyond = statistics.variance(logs) - chance
    most = 4 * statistics.fmean(freedoms)  # as docs/statistics.md says
    if beyond > special.polygamma(1, most / 2):
        most = 2 * optimize.brentq(lambda x: float(special.polygamma(1, x)) - beyond, 1e-6, most)
    return math.exp(statistics.median(logs)), most


def judged(table: dict[Hashable, Gaps]) -> dict[Hashable, Verdict]:
    """The verdicts on the cells of one table, of one metric."""
    own = {
        place: max(statistics.variance(gaps.seen), gaps.step**2)
        for place, gaps in table.items()
        if len(gaps.seen) > 1
    }
    own = {place: variance for place, variance in own.items() if variance > 1e-20}
    freedoms = {place: len(table[place].seen) - 1 for place in own}
    prior, weight = 1.0, 0.0
    if len(own) > 1:
        prior, weight = prior_of([*own.values()], [*freedoms.values()])
    found: dict[Hashable, Verdict] = {}
    for place, gaps in table.items():
        mean = statistics.fmean(gaps.every)
        if place not in own:
            found[place] = Verdict(mean, None, None, None, None)
            continue
        freedom = freedoms[place]
        share = weight / (weight + freedom)
        spread = math.sqrt(max(own[place], share * prior + (1 - share) * own[place]))
        free, error = min(weight + freedom, sum(freedoms.values())), spread / math.sqrt(freedom + 1)
        low, high = stats.t.interval(0.95, free, mean, error)
        p = 2 * float(stats.t.sf(abs(mean) / error, free)) if freedom > 1 else None
        found[place] = Verdict(mean, low, high, p, spread)
    order = sorted(
        (place for place in found if found[place].p is not None), key=lambda at: found[at].p
    )
    corrected = 0.0
    for rank, place in enumerate(order):
        corrected = max(corrected, min(1.0, (len(order) - rank) * found[place].p))
        found[place] = found[place]._replace(p=corrected)
    return found


class Cell(NamedTuple):
    values: dict[str, float]
    failed: list[str]


class Printed:
    """The cells of a command ``nmrun table FILES --rows ... --filter ... --baseline ROW``."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command)[2:]
        options: dict[str, list[str]] = {"": []}
        last = ""
        for word in words:
            if word.startswith("--"):
                last = word
            options.setdefault(last, [])
            if not word.startswith("--"):
                options[last].append(word)
        one = {name: ",".join(values) for name, values in options.items()}
        self.rows = one.get("--rows", "recipe").split(",")
        self.columns = one.get("--cols", RATIO).split(",")
        self.baseline = " ".join(map(number, one["--baseline"].split()))
        self.tables: dict[str, dict[tuple[str, str], Cell]] = {}
        self.higher: dict[str, bool] = {}
        runs = pd.concat(
            [pd.read_csv(ROOT / file, dtype=str, keep_default_na=False) for file in options[""]]
        ).fillna("")
        for condition in options.get("--filter", []):
            key, values = re.fullmatch(r"(.*?)!?=(.*)", condition).groups()
            allowed = {number(value) for value in values.split(",")}
            unlike = "!=" in condition
            fits = [value == "" or (number(value) in allowed) != unlike for value in runs[key]]
            runs = runs[fits]
        for data, some in runs.groupby("dataset", sort=False):
            self._fold(str(data), some, one.get("--metric", ""))

    def _fold(self, data: str, runs: pd.DataFrame, metric: str) -> None:
        metric = metric or f"test/{runs.metric.iloc[0].rpartition('/')[2]}"
        self.higher[data] = not re.search("perplexity|loss", metric)
        cells: dict[tuple[str, str], Cell] = {}
        runs = runs.sort_values("seed", key=lambda seeds: seeds.astype(int))
        for run in runs.to_dict("records"):
            row = " ".join(number(run[key]) or "-" for key in self.rows)
            at = " ".join(number(run[key]) or "-" for key in self.columns)
            cell = cells.setdefault((row, at), Cell({}, []))
            if run["status"] == "finished":
                cell.values[run["seed"]] = float(run[metric])
            else:
                cell.failed.append(run["seed"])
        if RATIO in self.columns:
            cells = self._dense_everywhere(cells)
        self.tables[data] = self._without_failed(cells, self.higher[data])

    def _dense_everywhere(self, cells: dict[tuple[str, str], Cell]) -> dict[tuple[str, str], Cell]:
        place, found = self.columns.index(RATIO), {}
        columns = {at for _, at in cells if "dense" not in at.split()}
        for (row, at), cell in cells.items():
            rest = at.split()
            alike = [
                other
                for other in sorted(columns)
                if rest[place] == "dense"
                and rest[:place] + rest[place + 1 :]
                == other.split()[:place] + other.split()[place + 1 :]
            ]
            found |= {(row, other): cell for other in alike or [at]}
        return found

    def _without_failed(self, cells, higher: bool) -> dict[tuple[str, str], Cell]:
        """A seed failed if it is worse than its cell's median by ten deviations and a tenth."""
        found = {}
        for (row, at), cell in cells.items():
            others = [
                statistics.stdev(c.values.values())
                for (r, a), c in cells.items()
                if a == at and r != row and len(c.values) > 1
            ]
            values = dict(cell.values)
            if len(values) > 2 and len(others) > 1:
                middle = statistics.median(values.values())
                most = max(
                    10 * max(statistics.median(others), self.step(cells, at)), abs(middle) / 10
                )
                values = {
                    seed: value
                    for seed, value in values.items()
                    if (middle - value if higher else value - middle) <= most
                }
            found[row, at] = Cell(values, [*cell.failed, *(cell.values.keys() - values.keys())])
        return found

    @staticmethod
    def step(cells: dict[tuple[str, str], Cell], at: str) -> float:
        every = sorted(v for (_, a), c in cells.items() if a == at for v in c.values.values())
        steps = [b - a for a, b in pairwise(every) if b - a > 1e-12 * abs(b)]
        return min(steps, default=0.0)

    def rival(self, row: str) -> str | None:
        """The baseline's row that agrees with this one in all that is not of the recipe."""
        rows = dict.fromkeys(r for cells in self.tables.values() for r, _ in cells)
        if self.baseline in rows:
            return self.baseline if row != self.baseline else None
        place = self.rows.index("recipe") if "recipe" in self.rows else 0
        same = [r for r in rows if r.split()[place] == self.baseline]
        mine = self._not_of_the_recipe(row)
        alike = [r for r in same if self._not_of_the_recipe(r) == mine]
        return alike[0] if alike and row not in same else None

    def _not_of_the_recipe(self, row: str) -> list[str]:
        return [
            value
            for key, value in zip(self.rows, row.split(), strict=True)
            if key.partition(".")[0] != "recipe"
        ]

    def gaps(self, data: str, row: str, at: str) -> Gaps | None:
        cells, rival = self.tables[data], self.rival(row)
        if rival is None or (rival, at) not in cells:
            return None
        worst = min if self.higher[data] else max
        sides = []
        for cell in (cells[row, at], cells[rival, at]):
            if not cell.values:
                return None
            sides.append(cell.values | dict.fromkeys(cell.failed, worst(cell.values.values())))
        failed = {*cells[row, at].failed, *cells[rival, at].failed}
        common = [seed for seed in sides[0] if seed in sides[1]]
        every = {seed: sides[0][seed] - sides[1][seed] for seed in common}
        seen = [gap for seed, gap in every.items() if seed not in failed]
        return Gaps(seen, [*every.values()], self.step(cells, at)) if every else None

    def differences(self) -> dict[tuple[str, str], Verdict]:
        """By row and column, of a command with one data set."""
        ((data, cells),) = self.tables.items()
        table = {place: self.gaps(data, *place) for place in cells}
        return judged({place: gaps for place, gaps in table.items() if gaps is not None})

    def by_data_set(self) -> dict[tuple[str, str], Verdict]:
        """By row and data set, in deviations of a run, over the cells of the data set."""
        table: dict[Hashable, Gaps] = {}
        for data, cells in self.tables.items():
            for row in {row for row, _ in cells}:
                found = [
                    self._in_deviations(data, row, at) for at in {at for r, at in cells if r == row}
                ]
                of_row = [each for each in found if each is not None]
                if of_row:
                    seeds = set.intersection(*({*gaps} for gaps, _, _ in of_row))
                    every = {s: statistics.fmean(gaps[s] for gaps, _, _ in of_row) for s in seeds}
                    failed = {seed for _, failed, _ in of_row for seed in failed}
                    step = min(step for _, _, step in of_row) / len(of_row)
                    seen = [gap for seed, gap in every.items() if seed not in failed]
                    table[row, data] = Gaps(seen, [*every.values()], step)
        return judged(table)

    def _in_deviations(self, data: str, row: str, at: str):
        cells, rival = self.tables[data], self.rival(row)
        if rival is None or (rival, at) not in cells:
            return None
        others = [
            cell
            for (r, a), cell in cells.items()
            if a == at and r not in (row, rival) and len(cell.values) > 1
        ]
        step = self.step(cells, at)
        unit = statistics.median(statistics.stdev(cell.values.values()) for cell in others)
        unit = max(unit * bias([len(cell.values) for cell in others]), step)
        sign, worst = (1, min) if self.higher[data] else (-1, max)
        ours, theirs = (
            cell.values | dict.fromkeys(cell.failed, worst(cell.values.values()))
            for cell in (cells[row, at], cells[rival, at])
        )
        gaps = {s: sign * (ours[s] - theirs[s]) / unit for s in ours if s in theirs}
        return gaps, {*cells[row, at].failed, *cells[rival, at].failed}, step / unit


def bias(counts: list[int]) -> float:
    """The mean of one over the median of sample deviations of normal runs, by quadrature: that of
    order statistics for rows of one size, of the sizes' mean for others."""
    size = round(statistics.fmean(counts))
    spread = stats.chi(size - 1, scale=1 / math.sqrt(size - 1))
    m = len(counts)
    if m % 2:
        k = m // 2
        shares = stats.beta(k + 1, k + 1)
        points = [(i + 0.5) / 20_000 for i in range(20_000)]
        return statistics.fmean((1 / spread.ppf(shares.ppf(points))).tolist())
    draws = spread.rvs((200_000, m), random_state=1)
    draws.sort(axis=1)
    return float((2 / (draws[:, m // 2 - 1] + draws[:, m // 2])).mean())


def number(text: str) -> str:
    """One way to write a number; other texts as they are."""
    try:
        return f"{float(text):.12g}"
    except ValueError:
        return text.replace(" ", "")
