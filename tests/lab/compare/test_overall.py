"""All cells together: against scipy's tests where they say the same, and by simulation."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from pages import markdown_lines
from recomputed import Gaps, judged
from scipy import stats
from verbs import verb

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.compare import differences as overall
from nmrun.lab.compare import statistics as tables_statistics
from nmrun.lab.compare.comparison import Comparison
from nmrun.lab.compare.differences import against
from nmrun.lab.compare.statistics import summarise
from nmrun.lab.compare.tables import Table, build
from nmrun.lab.render import formats, plots
from nmrun.lab.render.style import INK, Layout

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
    return {each.row[0]: each for each in overall.over_all_cells(tables, "sr_ste")}


def test_each_data_set_is_a_test_of_means_over_its_cells():
    """All of them are one family, whose spreads are moderated."""
    rows = of(words(), images())
    gaps = {
        (recipe, data): together(values, recipe, sign)
        for recipe in ("asp", "ste")
        for data, values, sign in (("shakespeare", WORDS, -1), ("digits", IMAGES, 1))
    }
    for (recipe, data), expected in judged({at: Gaps(g, g) for at, g in gaps.items()}).items():
        gap = rows[recipe].parts[data].gap
        assert (gap.mean, gap.low, gap.high, gap.p) == pytest.approx(expected[:4])
    assert list(rows["ste"].parts) == ["shakespeare", "digits"]
    assert [[value > 0 for value in each.means] for each in rows.values()] == [
        [True, False, True, False],
        [False, False, False, False],
    ]


def test_what_hangs_on_one_data_set_is_told():
    """The mean over all cells, and over those of all data sets but one."""
    small = {"2:4": IMAGES["2:4"]}
    one = of(words(), images(small))["asp"]
    a, b = (statistics.fmean(together(v, "asp", s)) for v, s in ((WORDS, -1), (small, 1)))
    assert one.mean == pytest.approx((2 * a + b) / 3)
    assert one.all_but == pytest.approx({"shakespeare": b, "digits": a})
    assert of(words())["asp"].all_but == {}


def test_a_dense_run_that_failed_is_one_failed_run():
    """Though it stands in the columns of all ratios."""
    seeds = [0.90, 0.91, 0.92, 0.93, 0.94]
    sparse = {"sr_ste": seeds, "step": seeds}
    runs = images({"dense": {"dense": seeds}, "2:4": sparse, "1:8": sparse}).runs
    runs.loc[0, "status"] = "failed"
    rows = of(build(runs, "test/accuracy", ["recipe"], ["sparsity"]))
    counts = {name: (row.failed, row.runs) for name, row in rows.items()}
    assert counts == {"dense": (1, 5), "step": (0, 10)}


def test_a_seed_that_failed_is_counted_and_is_the_worst_other_run():
    more = {"step": [7.0, 7.3, 7.1, 7.2], "s_ste": [7.0, 7.4, 7.0, 6.9]}

    def of_asp(last: Callable[[list[float]], float]) -> Table:
        values = {}
        for ratio, recipes in WORDS.items():
            first = recipes["asp"][:3]
            values[ratio] = {**recipes, **more, "asp": [*first, last(first)]}
        return words(values)

    failed = of_asp(lambda first: 50.0)
    failing, worst = of(failed)["asp"], of(of_asp(max))["asp"]
    assert failing.mean == pytest.approx(worst.mean)
    # and no observation
    assert failing.parts["shakespeare"].gap.n == 3
    assert (failing.failed, failing.runs) == (2, 8)
    comparison = Comparison([failed], overall.over_all_cells([failed], "sr_ste"))
    assert "2 of 8" in formats.render(comparison, "markdown")
    asp = {cell.counted() for (row, ratio), cell in failed.cells.items() if row == ("asp",)}
    assert asp == {"3, 1 failed"}


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
    assert words(cells).failed == failed
    # two rows are too few for a unit of other rows
    assert words({"2:4": {"ste": spread, "asp": [7.0, 7.1, 99.0]}}).failed == 0


def test_a_data_set_that_is_a_row_is_judged_by_its_own_rows():
    """As in tables of their own: digits vary by a hundredth of what the questions do."""
    questions = {
        "2:4": {"ste": [0.5, 0.6, 0.45], "sr_ste": [0.55, 0.61, 0.47], "asp": [0.4, 0.5, 0.45]}
    }
    digits = {
        "2:4": {
            name: [0.98 + seed / 1000, 0.98, 0.979]
            for seed, name in enumerate(("ste", "sr_ste", "asp", "step"))
        }
    }
    apart = [images(digits), table_of(questions, "glue", "accuracy")]
    runs = pd.concat([each.runs for each in apart])
    one = build(runs, "test/accuracy", ["dataset", "recipe"], ["sparsity"])
    assert one.failed == 0
    for each in apart:
        data = each.shared["dataset"]
        for (recipe, ratio), cell in each.cells.items():
            place = (data, *recipe), ratio
            assert one.cells[place] == cell
            assert one.digits(*place) == each.digits(recipe, ratio)
            assert one.step(*place) == each.step(recipe, ratio)
    found = {each.row: each for each in overall.over_all_cells([one], "sr_ste")}
    for recipe, row in of(*apart).items():
        for data, part in row.parts.items():
            assert found[data, recipe].means == part.means


def cut(values: Values, keeps: Callable[[str], int]) -> Values:
    """So many seeds of each recipe."""
    return {
        ratio: {name: v[:n] for name, v in recipes.items() if (n := keeps(name))}
        for ratio, recipes in values.items()
    }


def test_a_unit_is_of_other_rows_and_a_test_of_three_seeds():
    alone = of(words(cut(WORDS, lambda name: 4 * (name != "asp"))))["ste"].parts["shakespeare"].gap
    assert (alone.low, alone.p) == (None, None)
    assert alone.mean < 0
    two = cut(IMAGES, lambda name: 3 if name == "asp" else 2)
    parts = of(words(), images(two))["ste"].parts
    known = {data: (part.gap.low is None, part.gap.p is None) for data, part in parts.items()}
    assert known == {"shakespeare": (False, False), "digits": (False, True)}
    # the inverse of one deviation of two has no mean
    assert of(images(cut(IMAGES, lambda name: 2)))["ste"].parts["digits"].gap.low is None


def test_equal_differences_are_a_step_apart_at_least():
    """Runs that do not vary are one step apart; over two ratios half a step can be told from none."""
    still = {"ste": [0.91, 0.91, 0.91], "sr_ste": [0.90, 0.90, 0.90], "asp": [0.91, 0.91, 0.91]}
    one = of(images({"2:4": still, "1:8": still}))["ste"].parts["digits"].gap
    assert one.mean == pytest.approx(1.0)
    t = 2 * math.sqrt(3 / (0.8 * math.exp(np.euler_gamma) + 0.2))  # as of ties in a table
    assert one.p == pytest.approx(2 * stats.t.sf(t, 4) * 2)  # of two rows
    same = {"2:4": {"ste": [0.9, 0.9, 0.9], "sr_ste": [0.9, 0.9, 0.9]}}
    nothing = of(images(same))["ste"].parts["digits"].gap
    assert (nothing.mean, nothing.low, nothing.p) == (0.0, None, None)


def test_seeds_that_every_cell_has():
    nan = float("nan")
    holes = {"2:4": {**WORDS["2:4"], "asp": [nan, 6.9, 7.3, 7.0]}, "1:8": WORDS["1:8"]}
    rows = of(words(holes))
    assert [rows[recipe].parts["shakespeare"].gap.n for recipe in ("asp", "ste")] == [3, 4]
    apart = {
        "2:4": {"ste": [7.0, nan], "sr_ste": [7.0, 7.1]},
        "1:8": {"ste": [nan, 8.0], "sr_ste": [8.0, 8.1]},
    }
    # two cells that cannot be put together seed by seed
    one = of(words(apart))["ste"].parts["shakespeare"].gap
    assert (one.mean, one.low, one.p) == (pytest.approx(0.1 / 2 / 0.1), None, None)
    strangers = {"2:4": {"ste": [7.0, 7.1, nan, nan], "sr_ste": [nan, nan, 7.1, 7.2]}}
    with pytest.raises(ConfigError, match="no seed has a value there and in another row"):
        of(words(strangers))
    alone = {"2:4": {"ste": [7.0], "sr_ste": [7.1], "asp": [7.3]}}
    with pytest.raises(ConfigError, match="no cell has two seeds"):
        of(words(alone))


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
    cells = {}
    for ratio, spread in zip(ratios, spreads, strict=True):
        for name in names:
            gain = math.sqrt(2) * better * (name == "r1")
            values = spread * (common + rng.standard_normal(n) - gain)
            cells[(name,), ratio] = summarise(list(values))
    keys, shared = [(name,) for name in names], {"dataset": dataset}
    labels = ("recipe",), ("sparsity",)
    return Table("test/perplexity", *labels, keys, ratios, cells, shared=shared)


@pytest.mark.parametrize(
    ("rows", "n"), [(4, 2), (3, 5), pytest.param(7, 3, marks=pytest.mark.slow)]
)
def test_intervals_cover_and_tests_err_as_they_say(rows, n, monkeypatch):
    """From runs to the corrected p-values, with three data sets of unlike numbers of cells."""
    monkeypatch.setattr(tables_statistics, "detectable", lambda *_: 1.0)  # takes most of the time
    rng, tries = np.random.default_rng(10 * rows + n), 3000 // (rows - 1)
    covered, rejected = 0, 0
    for _ in range(tries):
        tables = [
            drawn(rng, data, np.exp(rng.standard_normal(cells)), rows, n)
            for data, cells in (("a", 5), ("b", 1), ("c", 2))
        ]
        compared = overall.over_all_cells(tables, "r0")
        gaps = [part.gap for each in compared for part in each.parts.values()]
        covered += sum(one.low <= 0 <= one.high for one in gaps)
        rejected += any(one.significant for one in gaps)
        assert all((one.p is None) == (n < 3) for one in gaps)
    # rows are compared with the same runs, so their errors come together; no spread becomes lower
    # than it was found, so intervals are on the safe side
    assert 0.94 < covered / tries / (rows - 1) / 3 < 0.995
    assert rejected / tries < 0.06


@pytest.mark.parametrize("better", [0.0, 1.0, 3.0])
def test_differences_are_the_true_ones_on_average(better, monkeypatch):
    """In true deviations of a run, though divided by sample deviations."""
    monkeypatch.setattr(tables_statistics, "detectable", lambda *_: 1.0)
    rng = np.random.default_rng(4)
    values = []
    for _ in range(150):
        table = drawn(rng, "a", np.exp(rng.standard_normal(3)), 4, 5, better)
        second, *_ = overall.over_all_cells([table], "r0")
        assert second.row == ("r1",)
        values.append(second.mean)
    assert np.mean(values) == pytest.approx(better, abs=0.08, rel=0.04)


@pytest.fixture
def runs(write: Callable[..., Any]) -> None:
    for ratio in ("2:4", "1:8"):
        for recipe, values in IMAGES[ratio].items():
            for seed, value in enumerate(values):
                write(recipe, ratio, seed, value)


def test_on_the_command_line_and_from_python(runs, table, tmp_path):
    asked = ("--baseline", "sr_ste", "--overall")
    status, out, _ = table(*asked)
    mean = statistics.fmean(together(IMAGES, "asp", 1))
    assert status == 0
    head, *rows = markdown_lines(out)
    assert head == ["recipe", "better in", "median cell", "all cells"]
    assert rows[0][3].startswith(f"{mean:+.2f} [".replace("-", "\N{MINUS SIGN}"))
    assert [row[:2] for row in rows] == [["asp", "1 of 2"], ["ste", "0 of 2"]]
    assert "Holm's correction for 2 comparisons" in out
    assert "not the same" not in out
    assert "no test" not in out
    frame = nmrun.table(tmp_path / "outputs", baseline="sr_ste", overall=True)
    assert [*zip(frame["recipe"], frame["dataset"], strict=True)] == [
        ("asp", "digits"), ("ste", "digits"),
    ]  # fmt: skip
    first = frame.iloc[0]
    assert (first["cells"], first["better"]) == (2, 1)
    assert first["difference"] == pytest.approx(mean)
    assert first["p"] > 0
    assert r"\begin{tabular}{lccc}" in table(*asked, "--format", "latex")[1]


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


def test_the_caption_says_why_two_rows_have_no_test(write, table):
    for seed in range(3):
        write("sr_ste", "2:4", seed, 0.9 + seed / 100)
        write("ste", "2:4", seed, 0.85 + seed / 50)
    asked = ("--baseline", "sr_ste", "--overall")
    _, out, _ = table(*asked)
    assert "give the unit" in out
    assert "interval" not in out
    for seed in range(3):
        write("asp", "2:4", seed, 0.8 + seed / 50)
    _, out, _ = table(*asked)
    assert "give the unit" not in out
    assert "with 95 % intervals" in out


def test_the_caption_says_which_data_sets_were_tuned():
    ste = words().runs["recipe"] == "ste"
    searched = {"tuned.trials": "6", "tuned.over": "optimizer.lr log 1e-4..1e-2", "tuned.by": "lr"}
    runs = words().runs.assign(**{key: ste.map({True: of}) for key, of in searched.items()})
    tables = [against(replace(words(), runs=runs), "sr_ste"), against(images(), "sr_ste")]
    comparison = Comparison(tables, overall.over_all_cells(tables, "sr_ste"))
    text = formats.render(comparison, "markdown")
    assert "in test/perplexity, test/accuracy by data set" in text
    each = "each cell tuned before by 6 trials by lr"
    assert re.search(rf"{each}[^;(]* \(ste\), none \(sr_ste, asp\) \(shakespeare\)", text)


def test_the_picture_has_a_point_for_each_cell_and_an_interval_for_each_data_set():
    tables = [against(each, "sr_ste") for each in (words(), images())]
    rows = overall.over_all_cells(tables, "sr_ste")
    (axes,) = plots.over_all_cells(Comparison(tables, rows), Layout()).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ASP", "STE"]
    drawn = {str(line.get_label()): line for line in axes.get_lines()}
    for data, name in (("shakespeare", "Tiny Shakespeare"), ("digits", "digits")):
        points = [*zip(*drawn[name].get_data(), strict=True)]
        for place, each in enumerate(rows):
            assert [y for x, y in points if round(x) == place] == each.parts[data].means
    bars = {tuple(line.get_ydata()) for line in axes.get_lines() if line.get_color() == INK}
    gaps = [part.gap for each in rows for part in each.parts.values()]
    assert bars == {(gap.low, gap.high) for gap in gaps}


def test_the_picture_on_the_command_line(runs, tmp_path):
    out = tmp_path / "all.svg"
    words = ("--kind", "overall", "--baseline", "sr_ste", "--out", str(out))
    assert verb("plot", str(tmp_path / "outputs"), *words) == 0
    assert "better than SR-STE by" in out.read_text()
