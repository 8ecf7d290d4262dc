"""A row without a ratio where columns are ratios of something else as well, such as optimizers."""

import csv
import io
import math

import pytest
from test_tables import cells

from nmrun.lab.compare.runs import collect
from nmrun.lab.compare.tables import build
from nmrun.lab.render import plots
from nmrun.lab.render.curves import History

COLUMNS = ("--cols", "optimizer,sparsity")
DENSE = {"adam": [0.90, 0.91, 0.93], "sgd": [0.70, 0.75, 0.78]}
STE = {
    ("adam", "2:4"): [0.80, 0.82, 0.81],
    ("adam", "1:8"): [0.60, 0.61, 0.66],
    ("sgd", "2:4"): [0.71, 0.74, 0.79],
}


@pytest.fixture(autouse=True)
def runs(write):
    for optimizer, values in DENSE.items():
        for seed, value in enumerate(values):
            write("dense", "dense", seed, value, optimizer__name=optimizer)
    for (optimizer, ratio), values in STE.items():
        for seed, value in enumerate(values):
            write("ste", ratio, seed, value, optimizer__name=optimizer)


def test_it_stands_in_the_columns_that_differ_in_the_ratio_alone(table):
    status, out, _ = table(*COLUMNS)
    assert status == 0
    assert cells(out)["dense"] == {
        "adam 2:4": "91.3 +- 1.5 (3)",
        "adam 1:8": "91.3 +- 1.5 (3)",
        "sgd 2:4": "74 +- 4 (3)",
    }


def test_it_is_compared_in_each(table):
    differences = cells(table(*COLUMNS, "--baseline", "dense")[1].split("Difference")[1])["ste"]
    by_hand = {
        f"{optimizer} {ratio}": 100 * (sum(values) - sum(DENSE[optimizer])) / 3
        for (optimizer, ratio), values in STE.items()
    }
    assert set(differences) == set(by_hand)
    for column, text in differences.items():
        mean = text.strip("*").split()[0].replace("\N{MINUS SIGN}", "-")
        assert float(mean) == pytest.approx(by_hand[column], abs=0.5)


def test_without_sparse_runs_beside_it_it_keeps_a_column(write, table):
    write("dense", "dense", 0, 0.5, optimizer__name="adamw")
    rows = cells(table(*COLUMNS)[1])
    assert rows["dense"]["adamw dense"] == "50.0 (1)"
    assert rows["ste"]["adamw dense"] == "-"
    assert rows["dense"]["sgd 2:4"] == "74 +- 4 (3)"


def test_it_is_a_line_for_each_optimizer_in_files(table):
    lines = list(csv.DictReader(io.StringIO(table(*COLUMNS, "--format", "csv")[1])))
    dense = [line for line in lines if line["recipe"] == "dense"]
    assert [(line["optimizer"], line["sparsity"]) for line in dense] == [
        ("adam", "dense"),
        ("sgd", "dense"),
    ]
    for line in dense:
        values = DENSE[line["optimizer"]]
        assert float(line["mean"]) == pytest.approx(sum(values) / 3)


def test_curves_are_of_its_own_optimizer(tmp_path):
    collected = collect([tmp_path])
    table = build(collected, "test/accuracy", ["recipe"], ["optimizer", "sparsity"])
    places = History(table).cells
    for optimizer, ratio in STE:
        of = places[("dense",), (optimizer, ratio)]
        assert {run["optimizer"] for run in of} == {optimizer}
        assert len(of) == 3


@pytest.mark.parametrize("kind", ["ratio", "flops"])
def test_lines_do_not_lead_from_one_optimizer_to_the_other(kind, tmp_path):
    collected = collect([tmp_path])
    collected["flops/training_arithmetic"] = 1e9
    table = build(collected, "test/accuracy", ["recipe"], ["optimizer", "sparsity"])
    figure = plots.draw(kind, History(table), "eval/accuracy")
    (axes,) = figure.axes
    assert {each[0].get_marker() for each in axes.containers} >= {"s"}  # seen where no line is
    lines = {each.get_label(): each[0].get_ydata().tolist() for each in axes.containers}
    for name, values in (("STE", STE), ("dense", DENSE)):
        means = [100 * sum(v) / 3 for v in values.values()]
        points = lines[name]
        if name == "dense" and kind == "ratio":
            means = [means[0], *means]  # in both of Adam's columns
        assert [v for v in points if not math.isnan(v)] == pytest.approx(means)
        assert [math.isnan(v) for v in points] == [False] * (len(means) - 1) + [True, False]
