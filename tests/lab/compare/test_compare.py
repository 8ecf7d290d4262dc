"""Comparison by functions alone, without a command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nmrun.errors import ConfigError
from nmrun.lab.compare.comparison import Query, compare, divide
from nmrun.lab.compare.runs import read_runs
from nmrun.lab.render.formats import render

STE, DENSE = [0.90, 0.92, 0.94], [0.95, 0.96, 1.00]
QUERY = Query(baseline="dense")


@pytest.fixture
def outputs(write: Any, tmp_path: Path) -> str:
    for seed, (ste, dense) in enumerate(zip(STE, DENSE, strict=True)):
        write("ste", "2:4", seed, ste)
        write("ste", "2:4", seed, ste - 0.1, optimizer__lr=0.1)
        write("dense", "dense", seed, dense)
    return str(tmp_path / "outputs")


def test_a_comparison_holds_cells_and_differences(outputs):
    runs = read_runs([outputs])
    before = runs.copy(deep=True)
    query = replace(QUERY, filter=("optimizer.lr=0.001",))
    (table,) = compare(runs, query).tables
    place = ("ste",), ("2:4",)
    assert table.cells[place].mean == pytest.approx(sum(STE) / 3)
    gap = table.differences[place]
    assert gap.mean == pytest.approx((sum(STE) - sum(DENSE)) / 3)
    assert gap.n == 3
    assert sorted(table.runs["seed"]) == [0, 0, 1, 1, 2, 2]
    over_all = compare(runs, replace(query, overall=True)).overall
    assert [row.row for row in over_all] == [("ste",)]
    assert runs.equals(before), "a frame is read, not written"


@pytest.mark.parametrize("style", ["markdown", "latex", "csv", "json"])
def test_it_is_rendered_as_the_command_prints_it(style, outputs, table):
    query = replace(QUERY, filter=("optimizer.lr=0.001",))
    words = ("--baseline", "dense", "--filter", "optimizer.lr=0.001", "--format", style)
    text = table(*words)[1]
    if style == "latex":  # how it was made stands above
        text = text.split("\n", 2)[2]
    assert render(compare(read_runs([outputs]), query), style) == text


def test_what_would_be_averaged_over_is_divided(outputs):
    runs = read_runs([outputs])
    with pytest.raises(ConfigError, match=r"differ in optimizer\.lr"):
        compare(runs, Query())
    (table,) = divide(runs, Query())
    assert table.row_keys == ("recipe", "optimizer.lr")
    assert table.rows == [("dense", "0.001"), ("ste", "0.001"), ("ste", "0.1")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "name it with --baseline"),
        ({"baseline": "dense", "cols": ("metric",)}, "one metric at a time"),
    ],
)
def test_over_all_cells_is_refused_before_a_run_is_read(settings, message):
    with pytest.raises(ConfigError, match=message):
        Query(overall=True, **settings)
