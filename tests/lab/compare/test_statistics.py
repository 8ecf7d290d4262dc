"""Differences between recipes: pairing by seed, tests, intervals, corrections; and where runs come
from besides folders.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import markdown_lines
from recomputed import Gaps, judged
from runs import result_of, rewrite
from scipy import stats
from test_tables import cells
from verbs import verb

from nmrun.lab.compare.statistics import (
    Difference,
    detectable,
    grain,
    holm,
    moderate,
    moderated,
    paired,
    step_down,
    summarise,
    t_two_sided,
)

OURS = {0: 0.97, 1: 0.96, 2: 0.99, 3: 0.95, 7: 0.5}
BASE = {0: 0.95, 1: 0.95, 2: 0.96, 3: 0.96, 9: 0.1}
GAPS = [0.02, 0.01, 0.03, -0.01]
IMAGES = 359  # of the digits' test split
M = "\N{MINUS SIGN}"


def alone(difference: Difference) -> Difference:
    """In a table of its own, where there is nothing to shrink to."""
    return moderated({0: difference})[0]


def gap(gaps: list[float], grain: float = 0.0) -> Difference:
    return alone(paired(summarise(gaps), summarise([0.0] * len(gaps)), grain))


def test_pairs_are_those_of_common_seeds():
    difference = alone(paired(summarise(OURS), summarise(BASE), 0.0))
    assert (difference.n, difference.mean) == (4, pytest.approx(0.0125))
    both = ([by_seed[seed] for seed in range(4)] for by_seed in (OURS, BASE))
    assert difference.p == pytest.approx(stats.ttest_rel(*both).pvalue)
    assert paired(summarise({0: 0.5}), summarise({1: 0.4}), 0.0) is None


def test_the_interval_is_students():
    difference = gap(GAPS)
    interval = stats.ttest_1samp(GAPS, 0.0).confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx(tuple(interval))
    # Student's t with one degree of freedom is Cauchy's: tan(0.475 pi)
    assert gap([1.0, 3.0]).high == pytest.approx(2.0 + math.tan(0.475 * math.pi))


def test_no_test_below_three_pairs():
    assert gap([0.1]) == Difference(pytest.approx(0.1), 1)
    two = gap([0.1, 0.2])
    assert (two.p, two.n) == (None, 2)
    assert two.low < 0.15 < two.high
    assert gap([0.1, 0.2, 0.3]).p == pytest.approx(stats.ttest_1samp([0.1, 0.2, 0.3], 0.0).pvalue)


def test_equal_differences_are_judged_by_the_grain():
    """With two degrees of freedom the tail is in closed form: 1 - t / sqrt(t^2 + 2)."""
    step = 1 / IMAGES
    for images in (1, 2, 8):
        t = images * math.sqrt(3)
        tied = gap([-images * step] * 3, step)
        assert tied.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
        half = 4.302652729911275 * step / math.sqrt(3)
        ends = -images * step - half, -images * step + half
        assert (tied.low, tied.high) == pytest.approx(ends)
    near = gap([-8 * step, -8 * step, -8 * step - 1e-9], step)
    assert near.p == pytest.approx(gap([-8 * step] * 3, step).p, rel=1e-6)
    same = gap([0.0, 0.0, 0.0], step)
    assert (same.p, same.mean) == (1.0, 0.0)
    assert same.low == -same.high < 0
    assert gap([0.0, 0.0, 0.0]) == Difference(0.0, 3)  # and nothing is known of the spread
    assert gap([0.1, 0.1, 0.1]).p is None


def test_the_grain_is_the_smallest_step():
    values = [round(IMAGES * share) / IMAGES for share in (0.95, 0.97, 0.953, 0.99)]
    values += [values[0] + 1 / IMAGES, values[0] + 1e-16, values[1]]
    assert grain(values) == pytest.approx(1 / IMAGES)
    assert grain([0.5, 0.5]) == grain([]) == 0.0
    assert grain([3e11, 3e11 + 2e5]) == pytest.approx(2e5)
    assert grain([5.41, 5.42, 3e13]) == pytest.approx(0.01)  # perplexities, one of which diverged


# --- spreads that borrow from each other ------------------------------------------------------------


@pytest.mark.parametrize(
    ("spreads", "sizes"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (5, 5, 5, 5, 5, 5)),  # as alike as by chance
        ((0.1, 0.3, 1.0, 3.0, 9.0), (5, 5, 5, 5, 5)),
        ((0.5, 1.0, 1.0, 3.0), (3, 4, 10, 2)),
    ],
)
def test_spreads_are_moderated_as_by_another_implementation(spreads, sizes):
    rng = np.random.default_rng(len(spreads))
    tables = [list(rng.normal(0.4, s, n)) for s, n in zip(spreads, sizes, strict=True)]
    cells = {i: paired(summarise(g), summarise([0.0] * len(g)), 0.0) for i, g in enumerate(tables)}
    found = holm(moderated(cells))
    for i, expected in judged({i: Gaps(g, g) for i, g in enumerate(tables)}).items():
        one = found[i]
        assert (one.mean, one.low, one.high, one.spread) == pytest.approx(
            (expected.mean, expected.low, expected.high, expected.spread)
        )
        assert one.p == (None if expected.p is None else pytest.approx(expected.p))


def test_a_row_that_diverged_hides_no_other():
    """Its spread is ten thousand times the others', which the prior is to be of."""
    calm = [gap([*np.random.default_rng(i).normal(0.0, 0.05, 5)]) for i in range(3)]
    ahead, wild = gap([-1.02, -0.97, -1.0, -1.05, -0.96]), gap([2e4, 4e4, 1e4, 3e4, 2e4])
    alone = moderated(dict(enumerate([ahead, *calm])))[0]
    beside = moderated(dict(enumerate([ahead, *calm, wild])))[0]
    assert beside.high - beside.low < 3 * (alone.high - alone.low)
    assert beside.p < 0.001


def test_the_ends_of_moderation_are_students_test_and_the_pooled_one():
    rng = np.random.default_rng(0)
    apart = np.array([1e-120, 1.0, 1e120])
    variance, freedom = moderate(apart, np.full(3, 4.0))
    assert variance[2] == apart[2]
    assert freedom == pytest.approx(4.0, abs=0.01)  # the prior has next to no weight
    # equal variances are less apart than by chance: one variance, of all degrees of freedom
    variance, freedom = moderate(np.full(5, 2.0), np.full(5, 1e4))
    assert variance == pytest.approx(2.0, rel=1e-3)
    assert freedom == pytest.approx(5e4)
    # of more samples the prior counts as four of them
    assert moderate(np.full(30, 2.0), np.full(30, 8.0))[1] == pytest.approx(5 * 8.0)
    # what is alone is as it was
    assert [*map(list, moderate(np.array([3.0]), np.array([4.0])))] == [[3.0], [4.0]]
    # and none becomes lower than it was found
    many = rng.chisquare(4, (100, 28)) / 4
    variance, freedom = moderate(many, np.full(28, 4.0))
    assert (variance >= many).all()
    assert (freedom <= 4 * 28).all()


@pytest.mark.parametrize(("higher_is_better", "worst"), [(True, 0.7), (False, 0.9)])
def test_a_failed_seed_counts_as_the_worst_other_run_and_is_no_observation(higher_is_better, worst):
    ours = summarise({0: 0.8, 1: 0.9, 2: 0.7}, ["failed"], [3])
    base = summarise({0: 0.6, 1: 0.65, 2: 0.7, 3: 0.6})
    found = paired(ours, base, 0.0, higher_is_better)
    seen = [0.8 - 0.6, 0.9 - 0.65, 0.7 - 0.7]
    assert found.mean == pytest.approx((sum(seen) + worst - 0.6) / 4)
    assert (found.n, found.spread) == (3, pytest.approx(statistics.stdev(seen)))
    # whichever side it is on
    other = paired(base, ours, 0.0, higher_is_better)
    assert other.mean == pytest.approx(-found.mean)
    none = summarise({}, ["failed"] * 2, [0, 1])
    assert paired(none, base, 0.0) is None


# --- what the test can see ------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "tests"), [(3, 1), (3, 24), (5, 84), (10, 18)])
def test_the_smallest_difference_is_found_four_times_in_five(n, tests):
    level = 0.05 / tests
    true = detectable(n - 1, level) / math.sqrt(n)
    gaps = np.random.default_rng(n).normal(true, 1.0, (40_000, n))
    p = stats.ttest_1samp(gaps, 0.0, axis=1).pvalue
    assert (p < level).mean() == pytest.approx(0.8, abs=0.01)


def test_the_documents_table_is_that_of_the_simulation():
    docs = Path(__file__).parents[3] / "docs"
    with (docs.parent / "benchmarks/results/verdicts.csv").open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["rows"] == "7"]
    found = re.findall(
        r"^\| ([^|]*?) \|((?: [\d.-]+ \|){5})$", (docs / "statistics.md").read_text(), re.M
    )
    assert len(found) > 5
    for name, figures in found:
        line = next(each for each in lines if (each["table"], each["seeds"]) == (name, "5"))
        columns = [f"false alarms, {test}" for test in ("paired", "smyth", "nmrun")]
        expected = [line[key] or "-" for key in (*columns, "power, paired", "power, nmrun")]
        assert [text.strip() for text in figures.split("|")[:5]] == expected


def test_holm_works_out_what_could_have_been_shown():
    gaps = {
        key: Difference(0.0, n, 0.5, freedom, p=0.2)
        for key, n, freedom in (("a", 3, 2.0), ("b", 5, 9.5))
    }
    differences = holm(gaps | {"c": Difference(0.0, 2, 0.5, 1.0)})
    assert differences["a"].least == pytest.approx(0.5 / 3**0.5 * detectable(2, 0.025))
    assert differences["b"].least == pytest.approx(0.5 / 5**0.5 * detectable(9.5, 0.025))
    assert differences["c"].least is None


# --- simulations: what intervals and p-values say is so ---------------------------------------------


def covered(gaps: np.ndarray, step: float, true: float) -> float:
    """How often the interval of a cell by itself has the true difference in it."""
    n = gaps.shape[-1]
    variance = np.maximum(gaps.var(-1, ddof=1), step**2)
    off = np.abs(gaps.mean(-1) - true) / np.sqrt(variance / n)
    return float((t_two_sided(off, n - 1) >= 0.05).mean())


def accuracies(share: float, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Of runs that are right about each test image with probability ``share``."""
    return np.random.default_rng(seed).binomial(IMAGES, share, shape) / IMAGES


@pytest.mark.parametrize("share", [0.9, 0.985, 0.998])
@pytest.mark.parametrize("n", range(2, 11))
def test_intervals_cover_no_less_where_accuracies_tie(n, share):
    """The least spread makes them wider where an image is much of the spread, and only there."""
    ours, base = (accuracies(share, (20_000, n), seed) for seed in (n, 100 + n))
    share_covered = covered(ours - base, 1 / IMAGES, 0.0)
    assert share_covered > 0.93
    if share == 0.9 and n > 2:
        assert share_covered < 0.97


@pytest.mark.parametrize(
    ("n", "share", "one_baseline"),
    [
        # by default the ends, where ties are rarest and most common
        pytest.param(n, share, one, marks=() if n != 5 and share != 0.985 else pytest.mark.minutes)
        for n in (3, 5, 10)
        for share in (0.9, 0.985, 0.998)
        for one in (True, False)
    ],
)
def test_a_table_without_differences_has_a_significant_one_in_one_of_twenty(n, share, one_baseline):
    """The family-wise error of 18 cells: columns of their own, with a baseline each, or a column
    with one baseline, in which the step of the metric is looked for.
    """
    ours = accuracies(share, (10_000, 18, n), n)
    base = accuracies(share, (10_000, 1 if one_baseline else 18, n), 100 + n)
    step: Any = 1 / IMAGES
    if one_baseline:
        columns = np.concatenate([ours, base], 1).reshape(len(ours), -1)
        step = np.array([[grain(column)] for column in columns])
        assert np.median(step) == pytest.approx(1 / IMAGES)
    gaps = ours - base
    variance, freedom = moderate(
        np.maximum(gaps.var(-1, ddof=1), step**2), np.full(gaps.shape[1], n - 1.0)
    )
    p = step_down(t_two_sided(np.abs(gaps.mean(-1)) / np.sqrt(variance / n), freedom))
    assert p.min() > 0
    # 5 %, and twice the standard error of 10,000 tables
    assert (p < 0.05).any(1).mean() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 10_000)


# --- tables ---------------------------------------------------------------------------------------


@pytest.fixture
def some_runs(write) -> None:
    for seed, base in enumerate([0.95, 0.95, 0.96, 0.96]):
        write("dense", "dense", seed, base)
        write("ste", "1:8", seed, base - 0.02 - 0.001 * seed)
        write("step", "1:8", seed, base - GAPS[seed])
        write("step", "2:4", seed, base)


def test_a_table_of_differences(some_runs, table):
    status, out, err = table("--baseline", "dense")
    assert (status, err) == (0, "")
    first, second = out.split("\n\nDifference")
    assert set(cells(first)) == {"dense", "ste", "step"}
    rows = cells(second)
    assert set(rows) == {"ste", "step"}
    # the spread of two columns is at least their smallest step; of one it is 1 %
    gaps = {
        ("ste", "1:8"): [-0.02, -0.021, -0.022, -0.023],
        ("step", "1:8"): [-g for g in GAPS],
        ("step", "2:4"): [0.0] * 4,
    }
    expected = judged({place: Gaps(g, g, 0.01 if not any(g) else 0.0) for place, g in gaps.items()})
    for (recipe, ratio), verdict in expected.items():
        figures = rows[recipe][ratio].replace(M, "-")
        mean, low, high = re.match(r"(\S+) \[(\S+), (\S+)\]", figures).groups()
        assert [float(mean), float(low), float(high)] == pytest.approx(
            [100 * end for end in (verdict.mean, verdict.low, verdict.high)], abs=0.06
        )
        star = "*" if verdict.p < 0.05 else ""
        assert figures.endswith(f"p={verdict.p:.2g}{star}")
    assert rows["ste"]["2:4"] == "-"
    what, how = second.splitlines()[:2]
    assert what.startswith(" to dense in percentage points, seed by seed, with its 95 %")
    assert "moderated t-test, Holm's correction for 3 comparisons (*: p < 0.05)" in how
    assert re.search(r"80 % power to find a true difference of [\d.]+ \(median\)", how)
    assert "no test" not in how
    assert table("--baseline", "dense", "--format", "latex")[1].isascii()


def test_flops_that_are_the_same_for_every_seed_differ_for_sure(write, table):
    for recipe, flops in (("dense", 2.5e9), ("ste", 1e9)):
        for seed in range(3):
            folder = write(recipe, "dense" if recipe == "dense" else "2:4", seed, 0.9)
            rewrite(folder, flops={"training_arithmetic": flops})
    words = ("--metric", "flops/training_arithmetic", "--baseline", "dense")
    told = table(*words)[1].split("Difference", 1)[1]
    assert cells(told)["ste"]["2:4"] == f"{M}1.500G"
    assert "fewer than three" not in told + table(*words, "--format", "latex")[1].lower()


def test_the_caption_says_what_few_seeds_leave_out(write, table):
    for seed in range(2):
        write("dense", "dense", seed, 0.9 + seed / 100)
        write("ste", "2:4", seed, 0.8)
    write("asp", "2:4", 0, 0.7)
    out = table("--baseline", "dense")[1].split("Difference", 1)[1]
    assert cells(out)["asp"]["2:4"] == f"{M}20.0 (1)"
    assert " p" not in cells(out)["ste"]["2:4"]
    caption = " ".join(out.splitlines()[:2])
    assert "no test: fewer than three seeds" in caption
    assert "Holm" not in caption
    assert "power" not in caption


def test_a_row_is_compared_within_its_data_set_alone(write, table):
    for seed in range(3):
        write("dense", "dense", seed, 0.9 + seed / 100)
        write("ste", "2:4", seed, 0.8 + seed / 100, trainer__epochs=24)
        write("ste", "2:4", seed, 0.7 + seed / 100, dataset__name="other")
    rows = ("--rows", "recipe,trainer.epochs,dataset", "--baseline", "dense 12 digits")
    out = table(*rows)[1].split("Difference", 1)[1]
    lines = [line for line in out.splitlines() if line.startswith("| ste")]
    assert [("p" in line, "24" in line) for line in lines] == [(False, False), (True, True)]


def test_a_row_is_compared_within_its_metric_alone(write, table):
    for seed in range(3):
        write("dense", "dense", seed, 0.9 + seed / 100, loss=0.3)
        write("ste", "2:4", seed, 0.8 + seed / 100, loss=0.4)
    rows = ("--rows", "recipe,metric", "--metric", "test/accuracy,test/loss")
    out = table(*rows, "--baseline", "dense test/accuracy")[1].split("Difference", 1)[1]
    shown = {tuple(line[:2]): line[2] for line in markdown_lines(out)[1:]}
    assert shown.pop(("ste", "test/accuracy")).startswith(f"{M}10.0")
    assert shown == {("dense", "test/loss"): "-", ("ste", "test/loss"): "-"}


def test_how_many_epochs_the_best_is_of(write, table):
    for recipe, number in (("ste", 6), ("asp", 4), ("lbc", 4)):
        folder = write(recipe, "2:4", 0, 0.9)
        metrics = result_of(folder)["metrics"]
        rewrite(folder, metrics=metrics | {"best": metrics["best"] | {"candidates": number}})
    best = ("--metric", "best/test/accuracy")
    assert "of epochs with N:M weights: 4 (asp, lbc), 6 (ste)" in table(*best)[1]
    assert "epochs with N:M" not in table()[1]
    assert "epochs with N:M" not in table(*best, "--filter", "recipe=ste")[1]
    write("maskllm", "2:4", 0, 0.9)  # of an older version
    assert "not known how many (maskllm)" in table(*best)[1]


def test_a_terminal_without_a_minus_sign(some_runs, monkeypatch, tmp_path):
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    assert verb("table", str(tmp_path / "outputs"), "--baseline", "dense") == 0
    assert b"| -2.1 [-3.0, -1.3] p" in buffer.getvalue()


def test_mistaken_baselines(write, table):
    write("ste", "1:8", 0, 0.9)
    write("asp", "1:8", 1, 0.9)
    told = "nmrun: --baseline sted: no such row; did you mean ste? (there are asp, ste)\n"
    assert table("--baseline", "sted")[::2] == (2, told)
    status, _, err = table("--baseline", "ste")
    assert (status, err.count("\n")) == (2, 1)
    assert "no seed has a value there and in another row" in err
    write("dense", "dense", 0, 0.9)
    write("ste", "1:8", 0, 0.9, model__name="mlp")  # a table without it
    told = "nmrun: --baseline dense: no such row (there are ste)\n"
    assert table("--baseline", "dense")[::2] == (2, told)


def test_several_metrics_side_by_side(write, table):
    write("ste", "2:4", 0, 0.9, loss=0.5)
    write("asp", "2:4", 0, 0.8, loss=0.25)
    out = cells(table("--metric", "test/accuracy,test/loss,seconds", "--cols", "metric")[1])
    assert out == {
        "asp": {"test/accuracy in %": "80.0", "test/loss": "**0.25**", "seconds": "**2.5**"},
        "ste": {"test/accuracy in %": "**90.0**", "test/loss": "0.5", "seconds": "**2.5**"},
    }
    status, _, err = table("--metric", "test/accuracy,test/loss")
    assert status == 2
    assert "--cols metric" in err
