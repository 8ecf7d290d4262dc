"""Run folders written by hand, with numbers whose means and deviations can be worked out on paper."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pages import markdown_lines
from runs import result_of, rewrite
from terminal import Terminal
from verbs import verb

from nmrun.errors import ConfigError
from nmrun.lab.compare import tables
from nmrun.lab.compare.comparison import Comparison, Query, compare, divide
from nmrun.lab.compare.differences import against
from nmrun.lab.compare.runs import collect, read_runs, to_csv
from nmrun.lab.compare.tables import build
from nmrun.lab.config import composition
from nmrun.lab.render import cli, plots
from nmrun.lab.render.curves import History
from nmrun.lab.render.formats import render


def cells(markdown: str) -> dict[str, dict[str, str]]:
    """A Markdown table as {row: {column: cell}}."""
    head, *lines = markdown_lines(markdown)
    return {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}


def comparison(write) -> None:
    """STEP: mean 98, deviation 1 (n = 3). STE: mean 97, deviation sqrt(2) (n = 2). SR-STE: a single
    run. Dense: mean 99, deviation 0.5.
    """
    for seed, (step, dense) in enumerate([(0.97, 0.985), (0.98, 0.99), (0.99, 0.995)]):
        write("step", "1:8", seed, step, recipe__switch="auto")
        write("dense", "dense", seed, dense)
    write("ste", "1:8", 0, 0.96)
    write("ste", "1:8", 1, 0.98)
    write("sr_ste", "1:8", 0, 0.9, recipe__decay=2e-4)
    write("ste", "2:4", 0, 0.985)


# --- collect and statistics -----------------------------------------------------------------------


def test_a_run_is_a_row(write, tmp_path):
    folder = write("step", "2:8", 3, 0.9, recipe__switch="auto", optimizer__lr=0.01)
    runs = collect([tmp_path])
    assert len(runs) == 1
    expected = {
        "recipe": "step", "sparsity": "2:8", "model": "small_conv", "dataset": "digits", "optimizer": "adam", "seed": 3,
        "optimizer.lr": 0.01, "recipe.switch": "auto", "model.channels": "[32,64]", "trainer.clip": None, "trainer.epochs": 12,
        "test/accuracy": 0.9, "best/test/accuracy": 0.905, "status": "finished", "id": folder.name.partition("-")[2], "folder": str(folder),
        "seconds": 2.5, "commit": "abc",
    }  # fmt: skip
    assert {key: runs[key][0] for key in expected} == expected


def test_any_depth_and_each_run_once(write, tmp_path, monkeypatch):
    one = write("ste", "2:4", 0, 0.9)
    write("dense", "dense", 0, 0.9)
    write("dense", "dense", 1, 0.9)
    monkeypatch.chdir(tmp_path)
    assert len(collect([one])) == 1
    assert len(collect(["outputs/digits/small_conv/dense"])) == 2
    assert len(collect(["outputs", tmp_path / "outputs", one])) == 3
    assert collect([tmp_path / "outputs/digits/small_conv/ste/1of8"]).empty


WITHOUT_METRICS = b'{"status": "finished", "id": "a", "config": {}}'


@pytest.mark.parametrize(
    "content", [b'{"status": "fini', b"[]", b"null", b"{}", WITHOUT_METRICS, b"\xff"]
)
def test_a_damaged_file_is_named_and_left_out(write, table, content):
    write("ste", "2:4", 0, 0.9)
    bad = write("ste", "2:4", 1, 0.5) / "result.json"
    bad.write_bytes(content)
    status, out, err = table()
    assert status == 0
    assert cells(out) == {"ste": {"2:4": "90.0"}}
    assert err.count("\n") == 1
    assert str(bad) in err


@pytest.mark.parametrize("strict", [False, True])
def test_a_folder_that_cannot_be_read_is_named(strict, write, table, monkeypatch, capsys):
    write("ste", "2:4", 0, 0.9)
    closed = write("ste", "2:4", 1, 0.5)
    scandir = os.scandir

    def refused(path):
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    status, out, err = table("--verify") if strict else table()
    line = f"{closed}: Permission denied\n"
    if strict:
        assert (status, out, err) == (1, "", f"nmrun: {line}")
        return
    assert (status, err) == (0, f"nmrun: left out: {line}")
    assert cells(out) == {"ste": {"2:4": "90.0"}}
    assert verb("status", str(closed.parents[1])) == 0
    assert capsys.readouterr().err == f"nmrun: left out: {line}"


@pytest.mark.parametrize(("name", "higher"), [("glossary_recall", True), ("ece", False)])
def test_a_metric_of_ones_own_is_better_as_its_task_says(name, higher, write, table, tmp_path):
    for recipe, value in (("ste", 0.25), ("asp", 0.75)):
        folder = write(recipe, "2:4", 0)
        metrics = {"final": {f"test/{name}": value}, "best": {}}
        rewrite(folder, metrics=metrics, metric=name, higher_is_better=higher)
    marked = {recipe: row["2:4"].startswith("**") for recipe, row in cells(table()[1]).items()}
    assert marked == {"asp": higher, "ste": not higher}
    (tmp_path / "runs.csv").write_text(to_csv(collect([tmp_path / "outputs"])))
    assert cells(table(paths=["runs.csv"])[1]) == cells(table()[1])


# --- what the table says --------------------------------------------------------------------------


def test_mean_deviation_n_best_and_the_dense_reference(write, table):
    comparison(write)
    status, out, err = table()
    assert (status, err) == (0, "")
    assert cells(out) == {
        "dense": {"2:4": "99.0 +- 0.5", "1:8": "99.0 +- 0.5"},
        "ste": {"2:4": "98.5 (1)", "1:8": "97.0 +- 1.4 (2)"},
        "sr_ste": {"2:4": "-", "1:8": "90.0 (1)"},
        "step": {"2:4": "-", "1:8": "**98.0 +- 1.0**"},
    }
    what, how, beware, blank, *lines = out.splitlines()
    assert what == "small_conv on digits, adam, learning rate 0.001, 12 epochs"
    assert how.startswith("test accuracy (%); mean")
    assert "bold: best sparse one of each column" in how
    assert beware.startswith("not the same in all cells: seeds")
    assert not blank
    assert len({len(line) for line in lines}) == 1, "aligned in a terminal"
    assert out.isascii()


def test_a_column_of_rows_stands_beside_each(write, table, monkeypatch):
    comparison(write)
    least = {"dense": 2, "ste": 4, "sr_ste": 7, "step": 8}
    monkeypatch.setitem(tables.ROW_COLUMNS, "least_m", lambda _, row: least[row[0]])
    records = json.loads(table("--format", "json")[1])
    assert {record["recipe"]: record["least_m"] for record in records} == least
    shown = cells(table()[1])
    assert {recipe: int(row["least_m"]) for recipe, row in shown.items()} == least


def test_best_weights_and_other_metrics(write, table):
    for seed, loss in enumerate([0.1, 0.2, 0.3, 0.6]):  # mean 0.3; squared distances add up to 0.14
        write("ste", "2:4", seed, 0.9, loss=loss)
    write("asp", "2:4", 0, 0.9, loss=12345.6)
    assert cells(table("--metric", "test/loss")[1]) == {
        "asp": {"2:4": "12346 (1)"},
        "ste": {"2:4": "**0.3 +- 0.2**"},
    }
    assert cells(table("--metric", "best/test/accuracy")[1])["asp"]["2:4"] == "**90.5 (1)**"


def test_order_of_rows_and_columns(write, table):
    """Recipes in nmrun's order, ratios from dense to sparse, numbers by their size."""
    recipes = ["zeta", "s_ste", "step", "alpha", "sr_ste", "ste", "asp"]
    ratios = ["1:16", "2:8", "4:8", "2:4", "3:4", "1:4", "10:16"]
    for recipe in recipes:
        for ratio in ratios:
            write(recipe, ratio, 0, 0.9)
    write("dense", "dense", 0, 0.9)
    rows = cells(table()[1])
    assert list(rows) == ["dense", "asp", "ste", "sr_ste", "step", "s_ste", "alpha", "zeta"]
    assert list(rows["ste"]) == ["3:4", "10:16", "2:4", "4:8", "1:4", "2:8", "1:16"]
    for lr in (0.01, 1e-05, 0.1, 10.0, 2.0):
        write("other", "2:4", 0, 0.9, optimizer__lr=lr)
    rows = cells(table("--rows", "optimizer.lr", "--filter", "recipe=other")[1])
    assert list(rows) == ["1e-05", "0.01", "0.1", "2.0", "10.0"]


def test_ties_at_the_printed_precision_are_all_marked(write, table):
    write("ste", "2:4", 0, 0.98123)
    write("step", "2:4", 0, 0.98149)
    write("asp", "2:4", 0, 0.98049)
    write("dense", "dense", 0, 0.99)
    column = {row: cell["2:4"] for row, cell in cells(table()[1]).items()}
    assert column == {"dense": "99.0", "asp": "98.0", "ste": "**98.1**", "step": "**98.1**"}


def test_runs_without_a_value_are_told(write, table):
    write("step", "2:4", 0, status="failed")
    write("step", "2:4", 1, status="failed")
    write("step", "2:4", 2, status="interrupted")
    assert cells(table()[1]) == {"step": {"2:4": "2 failed, 1 interrupted"}}
    write("ste", "2:4", 0, 0.9)
    write("ste", "2:4", 1, status="failed")
    write("ste", "2:4", 2)  # finished, but with another version that had no such metric
    told = "90.0 (1, 1 failed, 1 without a value)"
    assert cells(table("--filter", "recipe=ste")[1]) == {"ste": {"2:4": told}}
    write("dense", "dense", 0, 0.99)
    out = table("--filter", "recipe=dense")[1]
    assert cells(out) == {"dense": {"dense": "99.0"}}
    assert "bold" not in out


def test_rows_and_columns_of_any_keys(write, table):
    for lr in (0.1, 0.01):
        write("ste", "2:4", 0, 0.9 + lr / 10, optimizer__lr=lr)
        write("dense", "dense", 0, 0.95 + lr / 10, optimizer__lr=lr)
    assert markdown_lines(table("--rows", "recipe,optimizer.lr")[1])[1:] == [
        ["dense", "0.01", "95.1"], ["dense", "0.1", "96.0"], ["ste", "0.01", "90.1"], ["ste", "0.1", "**91.0**"],
    ]  # fmt: skip
    turned = cells(table("--rows", "sparsity", "--cols", "recipe,optimizer.lr")[1])
    assert turned["2:4"] == {
        **{"dense lr=0.01": "-", "dense lr=0.1": "-"},
        **{"ste lr=0.01": "90.1", "ste lr=0.1": "**91.0**"},
    }
    # dense and sparse runs share a row: dense is then a column
    by_rate = cells(table("--rows", "optimizer.lr")[1])
    assert by_rate == {
        "0.01": {"dense": "95.1", "2:4": "90.1"},
        "0.1": {"dense": "**96.0**", "2:4": "**91.0**"},
    }


def test_one_table_for_each_model_and_data_set(write, table):
    write("ste", "2:4", 0, 0.9)
    write("ste", "2:4", 0, 0.8, model__name="mlp")
    shown = re.findall(r"^(\w+) on digits|^\| ste +\| ([\d.]+) ", table()[1], re.M)
    assert shown == [("mlp", ""), ("", "80.0"), ("small_conv", ""), ("", "90.0")]
    assert cells(table("--rows", "model")[1]) == {
        "mlp": {"2:4": "80.0"},
        "small_conv": {"2:4": "**90.0**"},
    }


# --- what is not averaged -------------------------------------------------------------------------


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(write, table):
    for seed in (0, 1):
        write("ste", "2:4", seed, 0.9)
        write("asp", "2:4", seed, 0.8, recipe__prune_at=0.5)
    write("ste", "2:4", 2, 0.1, trainer__epochs=1, trainer__limit_batches=3)
    status, out, err = table()
    assert (status, out) == (2, "")
    differ = "trainer.epochs, trainer.limit_batches"
    assert err.startswith(f"nmrun: ste at 2:4 would average over runs that differ in {differ};")
    assert "--rows recipe,trainer.epochs,trainer.limit_batches" in err
    assert err.count("\n") == 1
    assert cells(table("--filter", "trainer.epochs=12")[1]) == {
        "asp": {"2:4": "80.0 +- 0.0"},
        "ste": {"2:4": "**90.0 +- 0.0**"},
    }
    assert table("--rows", "recipe,trainer.epochs")[1].count("\n| ") == 1 + 3


def test_runs_of_debugging_are_averaged_with_no_others(write, table):
    composition.register()
    with composition.composing():
        place = composition.composed(["debug=fast"], {}).output_dir
    write("ste", "2:4", 0, 0.9)
    write("ste", "2:4", 1, 0.1, root=place, trainer__limit_batches=3)
    assert cells(table()[1]) == {"ste": {"2:4": "90.0"}}
    assert cells(table(paths=(place,))[1]) == {"ste": {"2:4": "10.0"}}


def test_precisions_that_auto_was_on_two_machines_are_told_apart(write, table):
    """What they were asked for does not count where what they were is known."""
    folders = [write("ste", "2:4", seed, 0.9) for seed in (0, 1, 2)]
    for folder, precision in zip(folders, ("fp32", "bf16"), strict=False):
        rewrite(folder, environment={"precision": precision})
    assert "would average over runs that differ in precision;" in table()[2]
    assert "| fp32" in table("--rows", "recipe,precision")[1]
    asked = result_of(folders[1])["config"]
    asked["trainer"]["precision"] = "fp32"
    rewrite(folders[1], environment={"precision": "fp32"}, config=asked)
    assert "trainer.precision" in table()[2]
    rewrite(folders[2], environment={"precision": "fp32"})
    assert cells(table()[1])["ste"]["2:4"].startswith("90.0")
    rewrite(write("asp", "2:4", 0, 0.8), environment={"precision": "bf16"})
    assert "not the same in all cells: precision, seeds" in table()[1]


def test_one_refusal_names_the_settings_of_all_cells(write, table):
    for seed in (0, 1):
        write("ste", "2:4", seed, 0.9)
        write("step", "2:4", seed, 0.8, recipe__switch="auto")
    write("ste", "2:4", 2, 0.1, trainer__epochs=1)
    write("step", "2:4", 2, 0.7, recipe__switch=0.3)
    write("step", "2:4", 2, 0.1, recipe__switch=0.3, trainer__epochs=1, optimizer__lr=0.1)
    _, _, err = table()
    before = "nmrun: ste at 2:4 and 1 more cell would average over runs that differ in "
    named = err.removeprefix(before).split(";")[0].split(", ")
    assert sorted(named) == ["optimizer.lr", "recipe.switch", "trainer.epochs"]
    assert table("--rows", f"recipe,{','.join(named)}")[0] == 0
    mixed = table("--rows", "optimizer.lr,trainer.epochs")[2]
    assert "differ in recipe;" in mixed, "the recipe says it: its settings need no mention"


def test_what_does_not_change_a_result_and_another_recipes_setting_are_no_difference(write, table):
    write("ste", "2:4", 0, 0.9, trainer__device="cuda", track__name="wandb")
    write("ste", "2:4", 1, 0.9)
    write("step", "2:4", 0, 0.8, recipe__switch="auto")
    write("step", "2:4", 1, 0.7, recipe__switch=0.3)
    rows = cells(table("--filter", "recipe.switch=auto")[1])
    assert rows == {"ste": {"2:4": "**90.0 +- 0.0**"}, "step": {"2:4": "80.0 (1)"}}


@pytest.mark.parametrize(
    ("beside", "key", "one", "two", "matters"),
    [
        ({"trainer__budget": "seconds:600.0"}, "trainer__device", "cpu", "cuda", True),
        ({"trainer__budget": "flops:1e12"}, "trainer__device", "cpu", "cuda", False),
        ({"trainer__steps": 500}, "trainer__epochs", 3, 12, False),
        ({"trainer__distill": None}, "trainer__distill_weight", 0.5, 0.9, False),
        ({"trainer__distill": "start"}, "trainer__distill_weight", 0.5, 0.9, True),
        ({}, "trainer__activations_dense_end", 0.0, 0.2, False),
    ],
)
def test_a_key_of_the_trainer_counts_where_another_gives_it_an_effect(
    beside, key, one, two, matters, write, table
):
    write("ste", "2:4", 0, 0.9, **beside, **{key: one})
    write("ste", "2:4", 1, 0.9, **beside, **{key: two})
    status, _, err = table()
    assert (status, key.replace("__", ".") in err) == ((2, True) if matters else (0, False))


def test_a_key_counts_that_has_an_effect_in_one_of_the_runs(write, table):
    write("ste", "2:4", 0, 0.9, trainer__steps=500)
    write("ste", "2:4", 1, 0.9, trainer__epochs=3, trainer__steps=None)
    assert "differ in trainer.epochs, trainer.steps;" in table()[2]


def test_runs_that_begin_with_others_of_a_kind_are_averaged(write, table):
    """Seed by seed another network: what it was is what counts."""
    for seed in (0, 1):
        dense = write("dense", "dense", seed, 0.95)
        for ratio in ("2:4", "1:4"):
            pruned = write("wanda", ratio, seed, 0.7, init=str(dense))
            write("asp", ratio, seed, 0.9, init=str(dense), trainer__distill="start")
            write("asp", ratio, seed, 0.8, init=str(pruned), trainer__distill=str(dense))
            write("maskllm", ratio, seed, 0.9, recipe__masks=str(pruned))
        write("asp", "1:8", seed, 0.6, init=str(pruned))  # of another ratio
        write("dense", "dense", seed, 0.6, init=f"{pruned}/dense.safetensors")
    out = table("--rows", "recipe,init,trainer.distill", "--format", "csv")[1]
    counts = {
        (line["recipe"], line["init"], line["trainer.distill"], line["sparsity"]): line["n"]
        for line in csv.DictReader(out.splitlines())
    }
    rows = [("wanda", "dense", "null"), ("asp", "dense", "start"), ("asp", "wanda", "dense")]
    rows += [("maskllm", "null", "null")]  # whose recipe reads it
    assert counts == {
        ("dense", "null", "null", "dense"): "2",
        **{(*row, ratio): "2" for row in rows for ratio in ("2:4", "1:4")},
        ("asp", "wanda 1:4", "null", "1:8"): "2",
        ("dense", "wanda 1:4 (dense)", "null", "dense"): "2",
    }


def test_a_seed_counts_once(write, table):
    first = write("ste", "2:4", 0, 0.9)
    second = write("ste", "2:4", 0, 0.9, root="copied")
    status, out, err = table(paths=("outputs", "copied"))
    assert (status, out) == (2, "")
    assert "seed 0 2 times" in err
    assert str(first) in err
    assert str(second) in err


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        (["optimizer.lr=1e-3"], {"ste": {"2:4": "90.0"}}),
        (
            ["recipe.switch!=0.1", "optimizer.lr=0.01", "sparsity=1:4"],
            {"dense": {"1:4": "95.0"}, "asp": {"1:4": "70.0"}},
        ),
        (
            ["optimizer.lr=0.01", "recipe=step,asp"],
            {"asp": {"1:4": "**70.0**"}, "step": {"1:4": "60.0"}},
        ),
        (
            ["optimizer.lr!=1e-3", "recipe!=asp,step"],
            {"dense": {"2:4": "95.0"}, "ste": {"2:4": "80.0"}},
        ),
        (["sparsity!=dense,1:4", "optimizer.lr=0.01"], {"ste": {"2:4": "80.0"}}),
    ],
)
def test_filters(conditions, left, write, table):
    write("dense", "dense", 0, 0.95, optimizer__lr=0.01)
    write("ste", "2:4", 0, 0.9, optimizer__lr=0.001)
    write("ste", "2:4", 1, 0.8, optimizer__lr=0.01)
    write("asp", "1:4", 0, 0.7, optimizer__lr=0.01)
    write("step", "1:4", 0, 0.6, optimizer__lr=0.01, recipe__switch=0.1)
    assert cells(table("--filter", *conditions)[1]) == left


# --- dense training beside ratios of something else -----------------------------------------------


TWO = ("--cols", "optimizer,sparsity")
DENSE = {"adam": [0.90, 0.91, 0.93], "sgd": [0.70, 0.75, 0.78]}
STE = {
    ("adam", "2:4"): [0.80, 0.82, 0.81],
    ("adam", "1:8"): [0.60, 0.61, 0.66],
    ("sgd", "2:4"): [0.71, 0.74, 0.79],
}


@pytest.fixture
def two_optimizers(write):
    for optimizer, values in DENSE.items():
        for seed, value in enumerate(values):
            write("dense", "dense", seed, value, optimizer__name=optimizer)
    for (optimizer, ratio), values in STE.items():
        for seed, value in enumerate(values):
            write("ste", ratio, seed, value, optimizer__name=optimizer)


def test_it_stands_and_is_compared_in_the_columns_that_differ_in_the_ratio_alone(
    two_optimizers, write, table
):
    dense = {"adam 2:4": "91.3 +- 1.5", "adam 1:8": "91.3 +- 1.5", "sgd 2:4": "74 +- 4"}
    assert cells(table(*TWO)[1])["dense"] == dense
    differences = cells(table(*TWO, "--baseline", "dense")[1].split("Difference")[1])["ste"]
    for (optimizer, ratio), values in STE.items():
        by_hand = 100 * (sum(values) - sum(DENSE[optimizer])) / 3
        mean = differences.pop(f"{optimizer} {ratio}").strip("*").split()[0]
        assert float(mean.replace("\N{MINUS SIGN}", "-")) == pytest.approx(by_hand, abs=0.5)
    assert not differences
    lines = json.loads(table(*TWO, "--format", "json")[1])
    found = {  # a line for each optimizer
        (line["optimizer"], line["sparsity"]): line["mean"]
        for line in lines
        if line["recipe"] == "dense"
    }
    means = {(optimizer, "dense"): sum(values) / 3 for optimizer, values in DENSE.items()}
    assert found == pytest.approx(means)
    write("dense", "dense", 0, 0.5, optimizer__name="adamw")  # without sparse runs beside it
    rows = cells(table(*TWO)[1])
    assert rows["dense"] == {"adamw dense": "50.0 (1)", **dense}
    assert rows["ste"]["adamw dense"] == "-"


@pytest.mark.parametrize("kind", ["ratio", "flops"])
def test_lines_do_not_lead_from_one_optimizer_to_the_other(kind, two_optimizers, tmp_path):
    collected = collect([tmp_path])
    collected["flops/training_arithmetic"] = 1e9
    history = History(build(collected, "test/accuracy", ["recipe"], ["optimizer", "sparsity"]))
    for optimizer, ratio in STE:  # curves are of its own optimizer
        of = history.cells[("dense",), (optimizer, ratio)]
        assert [run["optimizer"] for run in of] == [optimizer] * 3
    (axes,) = plots.draw(kind, history, "eval/accuracy").axes
    assert {each[0].get_marker() for each in axes.containers} >= {"s"}  # seen where no line is
    lines = {each.get_label(): each[0].get_ydata().tolist() for each in axes.containers}
    for name, values in (("STE", STE), ("dense", DENSE)):
        means = [100 * sum(v) / 3 for v in values.values()]
        points = lines[name]
        if name == "dense" and kind == "ratio":
            means = [means[0], *means]  # in both of Adam's columns
        assert [v for v in points if not math.isnan(v)] == pytest.approx(means)
        assert [math.isnan(v) for v in points] == [False] * (len(means) - 1) + [True, False]


# --- formats --------------------------------------------------------------------------------------


def test_csv_is_long_and_exact(write, table, tmp_path):
    comparison(write)
    write("ste", "1:8", 2, status="failed")
    write("ste", "2:4", 0, 0.25, model__name="mlp")
    target = tmp_path / "table.csv"
    assert table("--format", "csv", "--out", str(target))[1] == f"{target}\n"
    rows = list(csv.DictReader(target.open()))
    assert list(rows[0]) == [
        *("dataset", "model", "recipe", "sparsity", "metric", "mean", "sd", "n", "best"),
        *("without", "median", "seeds", "values"),
    ]
    by_cell = {(row["model"], row["recipe"], row["sparsity"]): row for row in rows}
    assert len(by_cell) == len(rows) == 6
    ste, step = by_cell["small_conv", "ste", "1:8"], by_cell["small_conv", "step", "1:8"]
    assert float(ste["mean"]) == pytest.approx(0.97, rel=1e-12)
    assert float(ste["sd"]) == pytest.approx(0.02 / 2**0.5, rel=1e-12)
    counts = ("n", "best", "without")
    assert [ste[key] for key in counts] == ["2", "0", "1"]
    assert [step[key] for key in counts] == ["3", "1", "0"]
    assert step["metric"] == "test/accuracy"
    assert by_cell["small_conv", "dense", "dense"]["n"] == "3"
    assert (step["seeds"], step["values"]) == ("0 1 2", "0.97 0.98 0.99")
    (same,) = json.loads(table("--format", "json", "--filter", "recipe=step")[1])
    assert (same["seeds"], same["values"]) == ([0, 1, 2], [0.97, 0.98, 0.99])
    mlp = by_cell["mlp", "ste", "2:4"]
    assert [mlp[key] for key in ("mean", "sd", "n", "best")] == ["0.25", "", "1", "0"]


@pytest.mark.parametrize("style", ["csv", "json"])
def test_lines_of_tables_of_which_one_alone_has_the_baseline(style, write, tmp_path):
    for seed in range(3):
        write("dense", "dense", seed, 0.95 + seed / 100)
        for name in ("digits", "other"):
            write("ste", "2:4", seed, 0.9, dataset__name=name)
    one, other = compare(read_runs([str(tmp_path / "outputs")]), Query()).tables
    text = render(Comparison([against(one, "dense"), other]), style)
    lines = json.loads(text) if style == "json" else [*csv.DictReader(text.splitlines())]
    differences = [line["difference"] or None for line in lines if line["recipe"] == "ste"]
    assert [value and float(value) for value in differences] == [pytest.approx(-0.06), None]


def test_the_best_recipe_is_bold_wherever_recipes_stand(write, table):
    for recipe, at24, at18 in (("ste", 0.9, 0.7), ("step", 0.8, 0.75)):
        write(recipe, "2:4", 0, at24, loss=1 - at24)
        write(recipe, "1:8", 0, at18, loss=1 - at18)
    bold = {("ste", "2:4"), ("step", "1:8")}
    rows = cells(table()[1])
    turned = cells(table("--rows", "sparsity", "--cols", "recipe")[1])
    marked = {(r, c) for r in rows for c, text in rows[r].items() if text.startswith("**")}
    assert marked == bold
    assert {(c, r) for r in turned for c, text in turned[r].items() if "**" in text} == bold
    metrics = ("--cols", "metric", "--metric", "test/loss,test/accuracy")
    head, *lines = markdown_lines(table("--rows", "recipe,sparsity", *metrics)[1])
    assert head == ["recipe", "sparsity", "test/loss", "test/accuracy in %"], "as asked for"
    for column in (2, 3):
        assert {tuple(line[:2]) for line in lines if "**" in line[column]} == bold


def test_long_numbers_are_short_and_settings_say_their_key(write, table):
    write("ste", "2:4", 0, 0.9, optimizer__lr=6.263703785921783e-05)
    assert cells(table("--cols", "sparsity,optimizer.lr")[1]) == {
        "ste": {"2:4 lr=6.264e-05": "90.0"}
    }
    exact = table("--rows", "optimizer.lr", "--format", "csv")[1]
    assert "6.263703785921783e-05" in exact


def test_captions_break_at_words_where_a_terminal_ends(write, table, monkeypatch, tmp_path):
    comparison(write)
    plain = table()[1].partition("|")[0]
    terminal = Terminal(monkeypatch, width=60)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert verb("table", str(tmp_path / "outputs")) == 0
    shown = "\n".join(terminal.lines()).partition("|")[0]
    assert max(map(len, plain.splitlines())) > 60 >= max(map(len, shown.splitlines()))
    assert shown.split() == plain.split()


# --- pictures -------------------------------------------------------------------------------------


def test_plots_of_two_models_go_below_the_path(write, tmp_path, capsys):
    write("ste", "2:4", 0, 0.9)
    write("dense", "dense", 0, 0.9, model__name="mlp")
    assert cli.plot([str(tmp_path / "outputs")]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "outputs" / f"plot-{i}.png") for i in (1, 2)
    ]


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--metric test/acuracy", "test/acuracy: .*mean test/accuracy?.*best/test/accuracy, sec"),
        ("--rows lr", "lr: .*did you mean optimizer.lr?"),
        ("--cols sparsty", "did you mean sparsity?"),
        ("--filter sed=0", "did you mean seed?"),
        ("--filter optimizer.lr", "write KEY=VALUE"),
        ("--filter optimizer.lr=5,0.001", "no run has 5; optimizer.lr is 0.001"),
        ("--filter optimizer.lr!=0.001", "optimizer.lr!=0.001 leaves no run; optimizer.lr is"),
        ("--overall", "name it with --baseline"),
        ("--scale smoke", "--scale: .*without --experiment"),
        ("--runs --baseline ste", "--baseline: .*with --runs"),
        ("--runs --bib FILE", "--bib: .*with --runs"),
        ("--runs --format latex", "format=latex: no such format (there are csv, json)"),
        ("--format markdwon", "'markdwon'.*'markdown', 'latex', 'csv', 'json'"),
        ("--out /nowhere/at/all.md", "/nowhere/at/all.md: No such file or directory"),
    ],
)
def test_mistakes_get_one_line(write, table, arguments, message):
    write("ste", "2:4", 0, 0.9)
    status, out, err = table(*arguments.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.match(".*".join(map(re.escape, ["nmrun: ", *message.split(".*")])), err)


@pytest.mark.parametrize("verb_", ["table", "plot", "report"])
def test_without_a_path_it_is_the_folder_of_runs(verb_, write, monkeypatch, tmp_path):
    write("ste", "2:4", 0, 0.9)
    monkeypatch.chdir(tmp_path)
    assert verb(verb_) == 0
    files = {"plot": "plot.png", "report": "report.html"}
    assert verb_ == "table" or Path("outputs", files[verb_]).is_file()


@pytest.mark.parametrize(("verb_", "name"), [("plot", "plot.svg"), ("table", "table.md")])
def test_a_file_on_a_full_disk(verb_, name, write, tmp_path, small_disk, capsys):
    write("ste", "2:4", 0, 0.9)
    out = small_disk / name
    out.write_text("old")
    with contextlib.suppress(OSError):
        (small_disk / "others").write_bytes(bytes(2_000_000))
    assert verb(verb_, str(tmp_path), "--out", str(out)) == 1
    assert capsys.readouterr().err == (f"nmrun: {out}: No space left on device, 0 MB free there\n")
    assert out.read_text() == "old"


def test_the_command_line_of_tables_imports_no_pandas():
    code = "import sys; from nmrun.lab.render import cli; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_comparison_by_functions_alone(write, tmp_path, table):
    ste, dense = [0.90, 0.92, 0.94], [0.95, 0.96, 1.00]
    for seed, (ours, base) in enumerate(zip(ste, dense, strict=True)):
        write("ste", "2:4", seed, ours)
        write("ste", "2:4", seed, ours - 0.1, optimizer__lr=0.1)
        write("dense", "dense", seed, base)
    runs = read_runs([str(tmp_path / "outputs")])
    before = runs.copy(deep=True)
    query = Query(baseline="dense", filter=("optimizer.lr=0.001",))
    comparison = compare(runs, query)
    (found,) = comparison.tables
    place = ("ste",), ("2:4",)
    assert found.cells[place].mean == pytest.approx(sum(ste) / 3)
    assert found.differences[place].mean == pytest.approx((sum(ste) - sum(dense)) / 3)
    assert found.differences[place].n == 3
    assert [row.row for row in compare(runs, replace(query, overall=True)).overall] == [("ste",)]
    for style in ("markdown", "latex", "csv", "json"):
        asked = ("--baseline", "dense", "--filter", "optimizer.lr=0.001", "--format", style)
        assert table(*asked)[1].endswith(render(comparison, style))
    (divided,) = divide(runs, Query())
    assert divided.row_keys == ("recipe", "optimizer.lr")
    assert divided.rows == [("dense", "0.001"), ("ste", "0.001"), ("ste", "0.1")]
    assert runs.equals(before), "a frame is read, not written"
    with pytest.raises(ConfigError, match="one metric at a time"):
        Query(overall=True, baseline="dense", cols=("metric",))


def test_a_name_that_is_given_twice_is_there_once(write, table):
    for seed in (0, 1):
        write("ste", "2:4", seed, 0.5 + seed / 10, loss=0.1)
    accuracy, loss = "test/accuracy", "test/loss"
    assert table("--metric", f"{accuracy},{accuracy}") == table("--metric", accuracy)
    assert table("--rows", "recipe,recipe") == table("--rows", "recipe")
    both = table("--cols", "metric", "--metric", f"{accuracy},{loss}")
    assert both[0] == 0
    assert table("--cols", "metric,metric", "--metric", f"{accuracy},{loss},{accuracy}") == both
