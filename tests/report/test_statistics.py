"""Differences between recipes: pairing by seed, tests, intervals, corrections; and where runs come
from besides folders.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy import stats
from test_report import cells
from verbs import verb

from nmrun.report.collect import collect
from nmrun.report.statistics import Difference, holm, paired, summarise

OURS = {0: 0.97, 1: 0.96, 2: 0.99, 3: 0.95, 7: 0.5}
BASE = {0: 0.95, 1: 0.95, 2: 0.96, 3: 0.96, 9: 0.1}
GAPS = [0.02, 0.01, 0.03, -0.01]


def t_test(gaps: list[float]) -> float:
    """Two-sided, from the definition."""
    t = statistics.fmean(gaps) / (statistics.stdev(gaps) / math.sqrt(len(gaps)))
    return float(2 * stats.t.sf(abs(t), len(gaps) - 1))


def wilcoxon(gaps: list[float]) -> float:
    """Two-sided, by all sign patterns."""
    ranks = [sorted(map(abs, gaps)).index(abs(g)) + 1 for g in gaps]
    observed = sum(r for r, g in zip(ranks, gaps, strict=True) if g > 0)
    sums = [
        sum(r for r, s in zip(ranks, signs, strict=True) if s)
        for signs in itertools.product([0, 1], repeat=len(gaps))
    ]
    low = sum(s <= min(observed, sum(ranks) - observed) for s in sums)
    return min(1.0, 2 * low / len(sums))


def test_pairs_are_those_of_common_seeds() -> None:
    gap = paired(summarise(OURS), summarise(BASE))
    assert gap is not None
    assert (gap.n, gap.mean) == (4, pytest.approx(0.0125))
    assert gap.p == pytest.approx(t_test(GAPS))
    by_rank = paired(summarise(OURS), summarise(BASE), "wilcoxon")
    assert by_rank is not None
    assert by_rank.p == pytest.approx(wilcoxon(GAPS))


def test_the_interval_holds_95_percent_of_resampled_means() -> None:
    gap = paired(summarise(OURS), summarise(BASE))
    assert gap is not None
    # all 256 resamples
    means = sorted(statistics.fmean(drawn) for drawn in itertools.product(GAPS, repeat=4))
    assert gap.low == pytest.approx(means[int(0.025 * 256)], abs=2e-3)
    assert gap.high == pytest.approx(means[int(0.975 * 256)], abs=2e-3)


def test_few_seeds_and_no_spread() -> None:
    one = paired(summarise({0: 0.5}), summarise({0: 0.4, 1: 0.3}))
    assert one == Difference(pytest.approx(0.1), None, None, None, 1)
    assert paired(summarise({0: 0.5}), summarise({1: 0.4})) is None
    same = paired(summarise({0: 0.5, 1: 0.6}), summarise({0: 0.5, 1: 0.6}))
    assert same == Difference(0.0, 0.0, 0.0, 1.0, 2)
    shifted = paired(summarise({0: 0.5, 1: 0.75}), summarise({0: 0.25, 1: 0.5}))
    assert shifted is not None
    assert shifted.p == 0.0


def test_holm_by_hand() -> None:
    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005, "e": None}
    found = holm({key: Difference(0.0, None, None, p, 3) for key, p in ps.items()})
    assert {key: gap.p for key, gap in found.items()} == {
        "d": pytest.approx(0.02), "a": pytest.approx(0.03), "c": pytest.approx(0.06), "b": pytest.approx(0.06), "e": None,
    }  # fmt: skip


def some_runs(write) -> None:
    for seed, base in enumerate([0.95, 0.95, 0.96, 0.96]):
        write("dense", "dense", seed, base)
        write("ste", "1:8", seed, base - 0.02 - 0.001 * seed)
        write("step", "1:8", seed, base - GAPS[seed])
        write("step", "2:4", seed, base)


def test_a_table_of_differences(write, table) -> None:
    some_runs(write)
    status, out, err = table("--baseline", "dense")
    assert (status, err) == (0, "")
    first, second = out.split("\n\nDifference")[0], "Difference" + out.split("Difference", 1)[1]
    assert set(cells(first)) == {"dense", "ste", "step"}
    found = cells(second)
    assert set(found) == {"ste", "step"}
    assert found["ste"]["1:8"].startswith("**-2.2 [-2.3, -2.1] p")
    assert found["ste"]["1:8"].endswith("(4)**")
    assert found["ste"]["2:4"] == "-"
    assert found["step"]["2:4"] == "+0.0 [+0.0, +0.0] p=1 (4)"
    raw = t_test([-g for g in GAPS])  # the second smallest of three p-values: times two
    assert f"p={min(1, 2 * raw):.2g} (4)" in found["step"]["1:8"]
    assert "p corrected for 3 comparisons by Holm's method" in second
    assert "paired t-test" in second
    assert "Wilcoxon" in table("--baseline", "dense", "--test", "wilcoxon")[1]
    for style in ("latex", "html", "csv"):
        assert table("--baseline", "dense", "--format", style)[0] == 0


def test_a_recipe_as_the_baseline(write, table) -> None:
    some_runs(write)
    out = table("--baseline", "step")[1].split("Difference", 1)[1]
    assert cells(out)["dense"]["1:8"].startswith("+1.3")
    assert cells(out)["ste"]["2:4"] == "-"


def test_mistaken_baselines(write, table) -> None:
    write("ste", "1:8", 0, 0.9)
    write("asp", "1:8", 1, 0.9)
    assert table("--baseline", "sted")[::2] == (
        2,
        "nmrun: --baseline sted: no such row; did you mean ste? (there are asp, ste)\n",
    )
    status, _, err = table("--baseline", "ste")
    assert (status, err.count("\n")) == (2, 1)
    assert "no other row has runs of the same seeds" in err


def test_median_and_best(write, table) -> None:
    for seed, value in enumerate([0.9, 0.95, 0.97]):
        write("ste", "2:4", seed, value, loss=1 - value)
    assert cells(table("--show", "median")[1])["ste"]["2:4"] == "95.0 (3)"
    assert cells(table("--show", "best")[1])["ste"]["2:4"] == "97.0 (3)"
    assert cells(table("--show", "best", "--metric", "test/loss")[1])["ste"]["2:4"] == "0.03 (3)"


def test_several_metrics_side_by_side(write, table) -> None:
    write("ste", "2:4", 0, 0.9, loss=0.5)
    write("asp", "2:4", 0, 0.8, loss=0.25)
    out = cells(table("--metric", "test/accuracy,test/loss,seconds", "--cols", "metric")[1])
    assert out == {
        "asp": {"seconds": "**2.5 (1)**", "test/accuracy": "80.0 (1)", "test/loss": "**0.25 (1)**"},
        "ste": {"seconds": "**2.5 (1)**", "test/accuracy": "**90.0 (1)**", "test/loss": "0.5 (1)"},
    }
    status, _, err = table("--metric", "test/accuracy,test/loss")
    assert status == 2
    assert "--cols metric" in err


def test_versions_of_the_code_are_told(write, table) -> None:
    write("ste", "2:4", 0, 0.9)
    assert "versions of the code" not in table()[1]
    path = write("ste", "2:4", 1, 0.9) / "result.json"
    path.write_text(path.read_text().replace('"abc"', '"0123456789"'))
    assert "made by 2 versions of the code: 0123456, abc" in table()[1]


# --- Weights & Biases -----------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, runs: object) -> None:
    def listed(project: str) -> object:
        if isinstance(runs, Exception):
            raise runs
        assert project == "me/sparse"
        return runs

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(Api=lambda timeout: SimpleNamespace(runs=listed))
    )


def test_runs_from_wandb_are_those_of_the_folders(
    write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    result = json.loads((write("ste", "2:4", 3, 0.9) / "result.json").read_text())
    summary = {key: value for key, value in result.items() if key not in ("id", "config")} | {
        "_step": 9,
        "_wandb": {"x": 1},
    }
    ours = SimpleNamespace(
        config=result["config"],
        summary=summary,
        id=result["id"],
        url="https://wandb.ai/me/sparse/runs/1",
    )
    other = SimpleNamespace(config={"lr": 1}, summary={}, id="x", url="u")
    pretend(monkeypatch, [ours, other])
    there, here = collect(["wandb://me/sparse"]), collect([tmp_path / "outputs"])
    assert there.drop(columns="folder").to_dict("records") == here.drop(columns="folder").to_dict(
        "records"
    )
    assert "1 runs left out" in capsys.readouterr().err


def test_wandb_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, table) -> None:
    pretend(monkeypatch, ConnectionError("no route\nmore"))
    assert verb("table", "wandb://me/sparse") == 2
