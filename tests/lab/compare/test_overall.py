"""All cells together: against scipy's tests where they say the same, and by simulation."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy import stats
from verbs import verb

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.compare import overall
from nmrun.lab.compare.comparison import Comparison
from nmrun.lab.compare.overall import DataSetPart, mean
from nmrun.lab.compare.statistics import summarise
from nmrun.lab.compare.tables import Table, against, build
from nmrun.lab.show import formats, plots
from nmrun.lab.show.style import Layout

Values = dict[str, dict[str, list[float]]]  # by ratio and recipe, one a seed

WORDS: Values = {
    "2:4": {"ste": [7.0, 7.2, 7.1, 7.5], "sr_ste": [6.8, 7.1, 7.0, 7.1], "asp": [6.7, 6.9, 7.3, 7.0]},
    "1:8": {"ste": [8.0, 8.4, 8.2, 8.1], "sr_ste": [7.8, 8.1, 8.1, 7.6], "asp": [9.0, 9.3, 9.9, 9.1]},
}  # fmt: skip
IMAGES: Values = {
    "2:4": {"ste": [0.911, 0.90, 0.93], "sr_ste": [0.92, 0.93, 0.932], "asp": [0.94, 0.91, 0.95]},
    "1:8": {"ste": [0.81, 0.835, 0.84], "sr_ste": [0.82, 0.83, 0.86], "asp": [0.80, 0.83, 0.81]},
}


def table_of(values: Values, dataset: str, metric: str) -> Table:
    lines = [
        {"dataset": dataset, "model": "mlp", "recipe": recipe, "sparsity": ratio, "seed": seed,
         "status": "finished", "metric": metric, "folder": f"{recipe}{ratio}{seed}", f"test/{metric}": value}
        for ratio, recipes in values.items()
        for recipe, of_seeds in recipes.items()
        for seed, value in enumerate(of_seeds)
        if value == value
    ]  # fmt: skip
    return build(pd.DataFrame(lines), f"test/{metric}", ["recipe"], ["sparsity"])


def words(values: Values = WORDS) -> Table:
    return table_of(values, "shakespeare", "perplexity")


def images(values: Values = IMAGES) -> Table:
    return table_of(values, "digits", "accuracy")


def together(values: Values, recipe: str, sign: int) -> list[float]:
    """By seed the mean over the ratios of the difference to SR-STE, in deviations of the third row."""
    gaps = []
    for recipes in values.values():
        (third,) = set(recipes) - {recipe, "sr_ste"}
        unit = statistics.stdev(recipes[third]) * of_one_row(len(recipes[third]))
        pairs = zip(recipes[recipe], recipes["sr_ste"], strict=True)
        gaps.append([sign * (a - b) / unit for a, b in pairs])
    return [statistics.fmean(of_seed) for of_seed in zip(*gaps, strict=True)]


def of_one_row(n: int) -> float:
    """The mean of sigma / s over n normal runs, s their sample deviation."""
    chi = stats.chi(n - 1)
    return math.sqrt(n - 1) * float(chi.expect(lambda x: 1 / x))


def of(*tables: Table) -> dict[str, overall.Overall]:
    return {each.row[0]: each for each in overall.against(tables, "sr_ste")}


def test_one_data_set_is_a_t_test_of_means_over_its_cells():
    rows = of(words())
    p = {}
    for recipe in ("asp", "ste"):
        gaps = together(WORDS, recipe, -1)  # a lower perplexity is better
        test = stats.ttest_1samp(gaps, 0.0)
        low, high = test.confidence_interval()
        one, p[recipe] = rows[recipe].mean, test.pvalue
        assert (one.value, one.low, one.high) == pytest.approx((statistics.fmean(gaps), low, high))
        assert one.freedom == pytest.approx(3)
    first, second = sorted(p, key=p.__getitem__)
    assert rows[first].mean.p == pytest.approx(2 * p[first])  # Holm's
    assert rows[second].mean.p == pytest.approx(max(2 * p[first], p[second]))
    assert [[value > 0 for value in each.means] for each in rows.values()] == [
        [True, False],
        [False, False],
    ]


def test_two_data_sets_are_welchs_test():
    """The mean of two means is half of what Welch's test compares, with one of them negated."""
    rows = of(words(), images())
    for recipe in ("asp", "ste"):
        a, b = together(WORDS, recipe, -1), together(IMAGES, recipe, 1)
        test = stats.ttest_ind(a, [-gap for gap in b], equal_var=False)
        low, high = test.confidence_interval()
        one = mean(list(rows[recipe].parts.values()))
        assert (one.value, one.low, one.high) == pytest.approx(
            ((statistics.fmean(a) + statistics.fmean(b)) / 2, low / 2, high / 2)
        )
        assert one.p == pytest.approx(test.pvalue)
        assert one.freedom == pytest.approx(test.df)
        assert list(rows[recipe].parts) == ["shakespeare", "digits"]


def test_a_dense_run_that_failed_is_one_failed_run():
    """Though it stands in the columns of all ratios."""
    line = {"dataset": "x", "model": "mlp", "metric": "accuracy", "status": "finished"}
    runs = [
        {**line, "recipe": recipe, "sparsity": ratio, "seed": seed, "folder": f"{recipe}{ratio}{seed}", "test/accuracy": 0.9 + seed / 100}
        for recipe, ratio in (("dense", "dense"), ("ste", "2:4"), ("ste", "1:8"), ("step", "2:4"), ("step", "1:8"))
        for seed in range(5)
    ]  # fmt: skip
    runs[0]["status"] = "failed"
    table = build(pd.DataFrame(runs), "test/accuracy", ["recipe"], ["sparsity"])
    rows = {row.row[0]: (row.failed, row.runs) for row in overall.against([table], "ste")}
    assert rows == {"dense": (1, 5), "step": (0, 10)}


def test_every_cell_counts_alike():
    small = {"2:4": IMAGES["2:4"]}
    rows = of(words(), images(small))
    a, b = together(WORDS, "asp", -1), together(small, "asp", 1)
    expected = (2 * statistics.fmean(a) + statistics.fmean(b)) / 3
    assert rows["asp"].mean.value == pytest.approx(expected)


def test_a_recipe_that_fails_with_one_seed_changes_no_unit():
    two = {"step": [7.0, 7.3, 7.1, 7.2], "s_ste": [7.0, 7.4, 7.0, 6.9]}
    five = {ratio: {**recipes, **two} for ratio, recipes in WORDS.items()}
    failed = {
        ratio: {**recipes, "asp": [*recipes["asp"][:3], 5e3]} for ratio, recipes in five.items()
    }
    # of three other rows the median deviation is the middle one: S-STE's here, before and after
    bias = overall.inverse((4, 4, 4))
    calm = {ratio: {**recipes, "asp": [6.0, 7.0, 8.0, 9.0]} for ratio, recipes in five.items()}
    value = statistics.fmean(
        (statistics.fmean(recipes["sr_ste"]) - statistics.fmean(recipes["ste"])) / statistics.stdev(two["s_ste"]) / bias
        for recipes in five.values()
    )  # fmt: skip
    failing = value * overall.inverse((4, 4, 4)) / overall.inverse((3, 4, 4))
    for values, expected in ((failed, failing), (calm, value)):
        assert of(words(values))["ste"].mean.value == pytest.approx(expected)


def test_a_seed_that_failed_is_counted_and_in_no_difference():
    """With three of the four seeds the difference is that of these three."""
    more = {"step": [7.0, 7.3, 7.1, 7.2], "s_ste": [7.0, 7.4, 7.0, 6.9]}
    whole = {ratio: {**recipes, **more} for ratio, recipes in WORDS.items()}
    failed = {
        ratio: {**recipes, "asp": [*recipes["asp"][:3], 50.0]} for ratio, recipes in whole.items()
    }
    absent = {
        ratio: {**recipes, "asp": [*recipes["asp"][:3], math.nan]}
        for ratio, recipes in whole.items()
    }
    failing, expected = of(words(failed))["asp"], of(words(absent))["asp"]
    assert failing.mean.value == pytest.approx(expected.mean.value)
    assert (failing.failed, failing.runs) == (2, 8)
    text = formats.render(
        Comparison([words(failed)], overall.against([words(failed)], "sr_ste")), "markdown"
    )
    assert "2 of 8" in text
    (cell,) = {
        cell.counted() for (row, ratio), cell in words(failed).cells.items() if row == ("asp",)
    }
    assert cell == "3, 1 failed"


@pytest.mark.parametrize(
    ("worst", "failed"),
    [(7.0, 0), (8.0, 0), (8.2, 1), (7.7, 0), (-50.0, 0)],  # the deviations of the others are 0.1
)
def test_a_seed_has_failed_when_it_is_ten_deviations_worse(worst, failed):
    """Worse than the median of its cell by over ten median deviations of the other rows; a better
    seed never is.
    """
    spread = [6.9, 7.0, 7.1]  # a deviation of 0.1
    cells = {"2:4": {"sr_ste": spread, "ste": spread, "asp": [7.0, 7.1, worst]}}
    table = words(cells)
    assert table.failed == failed
    # two rows are too few for a unit of other rows
    assert words({"2:4": {"ste": spread, "asp": [7.0, 7.1, 99.0]}}).failed == 0


@pytest.mark.parametrize("n", [3, 4, 5, 10])
def test_the_unit_is_corrected_for_its_bias(n):
    assert overall.inverse((n,)) == pytest.approx(of_one_row(n))
    rng = np.random.default_rng(1)
    units = np.median(rng.standard_normal((100_000, 5, n)).std(axis=2, ddof=1), axis=1)
    assert overall.inverse((n,) * 5) == pytest.approx((1 / units).mean(), rel=0.005)


def test_the_compared_rows_alone_give_no_unit_for_several_cells():
    alone = {
        ratio: {name: recipes[name] for name in ("ste", "sr_ste")}
        for ratio, recipes in WORDS.items()
    }
    several = of(words(alone))["ste"].mean
    assert (several.low, several.p) == (None, None)
    assert several.value < 0
    one = {"2:4": alone["2:4"]}  # of which the unit cancels
    test = stats.ttest_rel(one["2:4"]["sr_ste"], one["2:4"]["ste"])
    assert of(words(one))["ste"].mean.p == pytest.approx(test.pvalue)


def test_three_seeds_of_each_data_set_for_a_test():
    two = {
        ratio: {name: v if name == "asp" else v[:2] for name, v in recipes.items()}
        for ratio, recipes in IMAGES.items()
    }
    gap = of(words(), images(two))["ste"].mean
    assert gap.low is not None
    assert gap.p is None
    assert of(words(), images())["ste"].mean.p is not None
    # the inverse of one deviation of two has no mean
    both = {
        ratio: {name: v[:2] for name, v in recipes.items()} for ratio, recipes in IMAGES.items()
    }
    assert of(images(both))["ste"].mean.low is None


def test_equal_differences_are_a_step_apart_at_least():
    """Seeds that differ by the same number of images show that the spread is below one."""
    tied = {"2:4": {"ste": [0.91, 0.92, 0.93], "sr_ste": [0.90, 0.91, 0.92]}}
    one = of(images(tied))["ste"].mean
    expected = stats.t.sf(np.sqrt(3), 2) * 2  # the mean is one step, and so is the spread
    assert one.p == pytest.approx(expected)
    # runs that do not vary are one step apart, and over two ratios half a step can be told from none
    still = {"ste": [0.91, 0.91, 0.91], "sr_ste": [0.90, 0.90, 0.90], "asp": [0.91, 0.91, 0.91]}
    one = of(images({"2:4": still, "1:8": still}))["ste"].mean
    assert one.value == pytest.approx(1.0)
    assert one.p == pytest.approx(stats.t.sf(2 * np.sqrt(3), 2) * 2 * 2)  # of two rows
    same = {"2:4": {"ste": [0.9, 0.9, 0.9], "sr_ste": [0.9, 0.9, 0.9]}}
    nothing = of(images(same))["ste"].mean
    assert (nothing.value, nothing.low, nothing.p) == (0.0, None, None)


def test_seeds_that_every_cell_has():
    nan = float("nan")
    holes = {"2:4": {**WORDS["2:4"], "asp": [nan, 6.9, 7.3, 7.0]}, "1:8": WORDS["1:8"]}
    rows = of(words(holes))
    assert [len(rows[recipe].parts["shakespeare"].gaps) for recipe in ("asp", "ste")] == [3, 4]
    apart = {
        "2:4": {"ste": [7.0, nan], "sr_ste": [7.0, 7.1]},
        "1:8": {"ste": [nan, 8.0], "sr_ste": [8.0, 8.1]},
    }
    one = of(words(apart))["ste"].mean  # two cells that cannot be put together seed by seed
    assert (one.value, one.low, one.p) == (pytest.approx(0.1 / 2 / 0.1), None, None)
    strangers = {"2:4": {"ste": [7.0, nan], "sr_ste": [nan, 7.1]}}
    with pytest.raises(ConfigError, match="no other row has runs of the same seeds"):
        of(words(strangers))


@pytest.mark.parametrize("n", [2, 3, 10])
def test_means_over_data_sets_of_unlike_spreads_cover_and_err_as_they_say(n):
    """And of unlike numbers of cells, two thousand times."""
    rng, cells, spreads = np.random.default_rng(n), [4, 4, 1, 1], [1.0, 0.3, 2.0, 0.7]
    every = [spread * rng.standard_normal((2_000, n)) for spread in spreads]
    covered = rejected = 0
    for gaps in zip(*every, strict=True):
        one = mean(
            [DataSetPart([0.0] * c, list(seeds), 0.0) for c, seeds in zip(cells, gaps, strict=True)]
        )
        covered += one.low <= 0.0 <= one.high
        rejected += one.p is not None and one.p < 0.05
    # with two seeds the approximation errs on the safe side
    assert 0.93 < covered / 2_000 < (0.99 if n == 2 else 0.97)
    assert rejected / 2_000 < 0.07


def drawn(
    rng: np.random.Generator,
    dataset: str,
    spreads: NDArray[np.float64],
    rows: int,
    n: int,
    better: float = 0.0,
) -> Table:
    """Recipes that do not differ, but for the second, which is better by so many deviations of a run:
    the runs of a seed have something in common, each column has its spread, and the baseline is the
    first.
    """
    names, ratios = [f"r{k}" for k in range(rows)], [(f"1:{2 << k}",) for k in range(len(spreads))]
    common = rng.standard_normal(n)
    cells = {
        ((name,), ratio): summarise(
            list(
                spread * (common + rng.standard_normal(n) - math.sqrt(2) * better * (name == "r1"))
            )
        )
        for ratio, spread in zip(ratios, spreads, strict=True)
        for name in names
    }
    keys, shared = [(name,) for name in names], {"dataset": dataset}
    return Table(
        "test/perplexity", "mean", ("recipe",), ("sparsity",), keys, ratios, cells, set(), set(),
        shared, [], [],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "n"), [(4, 2), (3, 5), pytest.param(7, 3, marks=pytest.mark.slow)]
)
def test_intervals_cover_and_tests_err_as_they_say(rows, n, monkeypatch):
    """From runs to the corrected p-values, with three data sets of unlike numbers of cells."""
    monkeypatch.setattr(overall, "detectable_mean", lambda *_: 1.0)  # takes most of the time
    rng, tries = np.random.default_rng(10 * rows + n), 600 // (rows - 1)
    covered, rejected = 0, 0
    for _ in range(tries):
        tables = [
            drawn(rng, data, np.exp(rng.standard_normal(cells)), rows, n)
            for data, cells in (("a", 5), ("b", 1), ("c", 2))
        ]
        means = [each.mean for each in overall.against(tables, "r0")]
        covered += sum(one.low <= 0 <= one.high for one in means if one.low is not None)
        rejected += any(one.significant for one in means)
        assert all((one.p is None) == (n < 3) for one in means)
    # rows are compared with the same runs, so their errors come together; with two seeds the
    # approximation errs on the safe side
    assert 0.92 < covered / tries / (rows - 1) < (0.99 if n == 2 else 0.98)
    assert rejected / tries < 0.08


@pytest.mark.parametrize(
    ("rows", "n", "cells", "better", "in_true_units"),
    [
        (4, 5, (3, 2), 1.0, 0.89),
        pytest.param(7, 3, (3, 2), 3.0, 0.67, marks=pytest.mark.slow),
        pytest.param(4, 5, (3, 2), 9.0, 0.27, marks=pytest.mark.slow),
        # as in the tuned comparisons
        pytest.param(7, 5, (4, 4, 8, 4, 4), 0.0, 0.95, marks=pytest.mark.slow),
        pytest.param(7, 5, (4, 4, 8, 4, 4), 1.0, 0.86, marks=pytest.mark.slow),
        pytest.param(7, 5, (4, 4, 8, 4, 4), 3.0, 0.51, marks=pytest.mark.slow),
        pytest.param(7, 5, (4, 4, 8, 4, 4), 9.0, 0.18, marks=pytest.mark.slow),
    ],
)
def test_intervals_cover_what_there_is_in_the_units_found(
    rows, n, cells, better, in_true_units, monkeypatch
):
    """The true difference of each cell, over the unit that its other rows gave. The mean over many
    tables is the true one in true deviations. These are covered less often: how well a unit is
    known is not in the interval.
    """
    monkeypatch.setattr(overall, "detectable_mean", lambda *_: 1.0)
    rng, tries, covered, values = np.random.default_rng(rows + n), 250, 0, []
    covered_true = 0
    for _ in range(tries):
        tables, truths = [], []
        for data, columns in enumerate(cells):
            spreads = np.exp(rng.standard_normal(columns))
            table = drawn(rng, f"d{data}", spreads, rows, n, better)
            for column, spread in zip(table.columns, spreads, strict=True):
                others = [table.cells[(f"r{k}",), column].values for k in range(2, rows)]
                unit = np.median([statistics.stdev(cell.values()) for cell in others])
                truths.append(
                    better * math.sqrt(2) * spread / unit / overall.inverse((n,) * (rows - 2))
                )
            tables.append(table)
        one = next(each.mean for each in overall.against(tables, "r0") if each.row == ("r1",))
        truth = statistics.fmean(truths)
        covered += one.low <= truth <= one.high
        covered_true += one.low <= better <= one.high
        values.append(one.value)
    assert 0.92 < covered / tries < 0.99
    assert covered_true / tries == pytest.approx(in_true_units, abs=0.06)
    assert np.mean(values) == pytest.approx(better, abs=0.08, rel=0.04)


def test_the_smallest_difference_is_found_four_times_in_five():
    rng = np.random.default_rng(0)
    spreads, rejected, tries = [1.0, 0.5], 0, 2_000
    # what it would be with the true spreads; each sample says its own
    error = np.hypot(*spreads) / 2 / np.sqrt(5)
    freedom = sum(s**2 for s in spreads) ** 2 / sum(s**4 / 4 for s in spreads)
    true = error * overall.detectable_mean(freedom, 0.05)
    for _ in range(tries):
        parts = [DataSetPart([0.0], list(true + s * rng.standard_normal(5)), 0.0) for s in spreads]
        p = mean(parts).p
        rejected += p is not None and p < 0.05
    assert 0.77 < rejected / tries < 0.83


@pytest.fixture
def runs(write: Callable[..., Any]) -> None:
    for ratio in ("2:4", "1:8"):
        for recipe, values in IMAGES[ratio].items():
            for seed, value in enumerate(values):
                write(recipe, ratio, seed, value)


def test_on_the_command_line_and_from_python(runs, table, tmp_path):
    status, out, _ = table("--baseline", "sr_ste", "--overall")
    gaps = together(IMAGES, "asp", 1)
    assert status == 0
    head, _rule, asp, ste = [line for line in out.splitlines() if line[:1] == "|"]
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "recipe",
        "better in",
        "median cell",
        "all cells",
    ]
    assert (
        asp.split("|")[4]
        .strip()
        .startswith(f"{statistics.fmean(gaps):+.2f} [".replace("-", "\N{MINUS SIGN}"))
    )
    assert [line.split("|")[2].strip() for line in (asp, ste)] == ["1 of 2", "0 of 2"]
    assert "Holm's correction for 2 comparisons" in out
    assert "not the same" not in out
    assert "no test" not in out

    status, out, _ = table("--baseline", "sr_ste", "--overall", "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(out)))
    assert [(line["recipe"], line["dataset"]) for line in lines] == [
        ("asp", "digits"), ("asp", "all cells"), ("ste", "digits"), ("ste", "all cells"),
    ]  # fmt: skip
    assert float(lines[1]["difference"]) == pytest.approx(statistics.fmean(gaps))
    assert lines[0]["p"] == ""

    frame = nmrun.table(tmp_path / "outputs", baseline="sr_ste", overall=True)
    whole = frame.set_index(["recipe", "dataset"]).loc[("asp", "all cells")]
    assert (whole["cells"], whole["better"]) == (2, 1)
    assert whole["difference"] == pytest.approx(statistics.fmean(gaps))

    assert (
        r"\begin{tabular}{lccc}"
        in table("--baseline", "sr_ste", "--overall", "--format", "latex")[1]
    )


def test_the_caption_says_what_differs(write, table):
    for seed in range(2):
        write("sr_ste", "2:4", seed, 0.9 + seed / 100)
        write("ste", "2:4", seed, 0.8, trainer__epochs=24)
        for ratio in ("2:4", "1:8"):
            write("asp", ratio, seed, 0.8 + seed / 50)
    _, out, _ = table("--baseline", "sr_ste", "--overall")
    assert "in test/accuracy" in out
    assert "not the same in all cells: epochs" in out
    assert "no test for fewer than three seeds of a data set" in out
    assert "no interval for" not in out
    for seed in range(2):
        write("sr_ste", "1:8", seed, 0.9 + seed / 100)
    _, out, _ = table("--baseline", "sr_ste", "--overall")
    assert "only the two rows compared" in out
    write("step", "2:4", 0, 0.9)
    assert "no interval for fewer than two" in table("--baseline", "sr_ste", "--overall")[1]


def test_the_caption_says_how_each_data_set_was_tuned():
    ste = words().runs["recipe"] == "ste"
    searched = {"tuned.trials": "6", "tuned.over": "optimizer.lr log 1e-4..1e-2", "tuned.by": "lr"}
    runs = words().runs.assign(**{key: ste.map({True: of}) for key, of in searched.items()})
    of_images = {"3": [("ste",)], "-": [("asp",)]}
    tables = [
        against(replace(words(), runs=runs), "sr_ste"),
        against(replace(images(), candidates=of_images), "sr_ste"),
    ]
    text = formats.render(Comparison(tables, overall.against(tables, "sr_ste")), "markdown")
    assert "in test/perplexity, test/accuracy over all" in text
    each = "each cell tuned before by 6 trials by lr"
    assert re.search(rf"{each}[^;(]* \(ste\), none \(sr_ste, asp\) \(shakespeare\);", text)
    assert "3 (ste), not known how many (asp) (digits)" in text


def test_the_picture_has_a_point_for_each_cell_and_the_interval_of_all():
    tables = [against(each, "sr_ste") for each in (words(), images())]
    rows = overall.against(tables, "sr_ste")
    (axes,) = plots.over_all_cells(Comparison(tables, rows), Layout(labels={"asp": "Ours"})).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["Ours", "STE"]
    drawn = {str(line.get_label()): line for line in axes.get_lines()}
    for data, name in (("shakespeare", "Tiny Shakespeare"), ("digits", "digits")):
        points = list(zip(*map(list, drawn[name].get_data()), strict=True))
        for place, each in enumerate(rows):
            heights = [y for x, y in points if round(x) == place]
            assert heights == each.parts[data].means
    (bars,) = axes.containers
    ends = [tuple(segment[:, 1]) for segment in bars[2][0].get_segments()]
    assert ends == [pytest.approx((each.mean.low, each.mean.high)) for each in rows]


def test_the_picture_on_the_command_line(runs, tmp_path, capsys):
    folder, out = str(tmp_path / "outputs"), str(tmp_path / "all.svg")
    asked = ("plot", folder, "--kind", "overall", "--out", out)
    assert verb(*asked, "--baseline", "sr_ste") == 0
    assert "better than SR-STE by" in Path(out).read_text()
    capsys.readouterr()
    assert verb(*asked) == 2
    assert "name it with --baseline" in capsys.readouterr().err
    assert verb("plot", folder, "--baseline", "sr_ste") == 2
    assert "--baseline is for --kind overall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ("--overall",),
            "nmrun: over all cells each row is compared with one of them: name it with --baseline",
        ),
        (("--overall", "--baseline", "sr_ste", "--rows", "recipe,metric"), "no row or column"),
        (("--overall", "--baseline", "srste"), "no such row; did you mean sr_ste?"),
    ],
)
def test_mistakes(words, complaint, runs, table):
    status, out, wrong = table(*words)
    assert (status, out) == (2, "")
    assert complaint in wrong
    assert wrong.count("\n") == 1
