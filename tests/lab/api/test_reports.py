"""``nmrun.runs``, ``nmrun.table`` and ``nmrun.plot`` beside the files and the verbs."""

from __future__ import annotations

import csv
import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nmrun
from nmrun.errors import ConfigError


@pytest.fixture
def outputs(write: Any, tmp_path: Path) -> Path:
    for seed in (0, 1, 2):
        write("dense", "dense", seed, 0.9 + 0.01 * seed)
        for lr in (1e-3, 3e-3):
            write("step", "2:8", seed, 0.8 + 0.02 * seed + lr, optimizer__lr=lr)
    write("sr_ste", "2:8", 0, status="failed")
    return tmp_path / "outputs"


def test_runs_have_types(outputs):
    runs = nmrun.runs(outputs)
    assert len(runs) == 10
    for key in ("recipe", "sparsity", "status", "folder"):
        assert all(isinstance(value, str) for value in runs[key])
    assert runs["seed"].dtype == "int64"
    assert runs["test/accuracy"].dtype == "float64"
    assert runs["optimizer.lr"].dtype == "float64"
    assert set(runs["sparsity"]) == {"dense", "2:8"}
    step = runs[(runs["recipe"] == "step") & (runs["optimizer.lr"] == 3e-3)].sort_values("seed")
    assert step["test/accuracy"].tolist() == [0.8 + 0.02 * seed + 3e-3 for seed in (0, 1, 2)]
    failed = runs[runs["status"] == "failed"]
    assert failed["recipe"].tolist() == ["sr_ste"]
    assert math.isnan(failed["test/accuracy"].iloc[0])
    # settings that do not differ stand apart
    assert "trainer.epochs" not in runs
    assert runs.attrs["shared"]["trainer.epochs"] == 12
    assert "optimizer.lr" not in runs.attrs["shared"]


def test_whole_numbers_stay_whole_beside_runs_without_them(write, tmp_path):
    for seed, interval in enumerate((2, 3)):
        write("ste_periodic", "2:4", seed, 0.5, recipe__interval=interval)
    write("ste", "2:4", 0, 0.5)
    runs = nmrun.runs(tmp_path / "outputs")
    assert runs["recipe.interval"].dtype == "Int64"
    by_recipe = runs.groupby("recipe")["recipe.interval"]
    assert sorted(by_recipe.get_group("ste_periodic")) == [2, 3]
    assert by_recipe.get_group("ste").isna().all()


def test_a_csv_file_may_have_no_optimizer(tmp_path):
    (tmp_path / "runs.csv").write_text(
        "dataset,model,recipe,sparsity,seed,status,metric,test/accuracy\n"
        "digits,mlp,asp,2:4,0,finished,accuracy,0.5\n"
    )
    runs = nmrun.runs(tmp_path / "runs.csv")
    assert "optimizer" not in runs
    assert runs["test/accuracy"].tolist() == [0.5]


def test_a_filter_is_that_of_the_verb(outputs, table):
    assert set(nmrun.runs(outputs, "recipe=step")["recipe"]) == {"step"}
    assert len(nmrun.runs(outputs, ["recipe=step", "optimizer.lr=0.003"])) == 3
    for condition in ("recipe", "recipe=stpe", "recpie=step"):
        with pytest.raises(ConfigError) as raised:
            nmrun.runs(outputs, [condition])
        assert table("--filter", condition)[2] == f"nmrun: {raised.value}\n"
    with pytest.raises(ConfigError, match=r"^\S*nowhere: no such folder of runs"):
        nmrun.runs(outputs / "nowhere")


def test_a_table_is_that_of_the_verb(outputs, table):
    asked = ("--rows", "recipe,optimizer.lr", "--baseline", "dense 0.001", "--format", "csv")
    status, text, _ = table(*asked)
    assert status == 0
    ours = nmrun.table(outputs, rows=["recipe", "optimizer.lr"], baseline="dense 0.001")
    theirs = list(csv.DictReader(io.StringIO(text)))
    assert list(ours.columns) == list(theirs[0])
    for mine, line in zip(ours.to_dict("records"), theirs, strict=True):
        for key, value in line.items():
            if key in ("seeds", "values"):
                assert [float(one) for one in value.split()] == mine[key]
            elif value == "":
                assert math.isnan(mine[key]), key
            else:
                assert (
                    float(value) == mine[key]
                    if not isinstance(mine[key], str)
                    else value == mine[key]
                )
    step = ours[ours["recipe"] == "step"]
    assert step["mean"].tolist() == pytest.approx([0.821, 0.823])
    assert step["difference"].tolist() == pytest.approx([-0.089, -0.087])
    assert ours["n"].dtype == "int64"
    assert ours["best"].dtype == bool
    assert ours["optimizer.lr"].dtype == "float64"
    with pytest.raises(ConfigError, match=r"would average over runs that differ in optimizer\.lr"):
        nmrun.table(outputs)


def test_several_metrics(outputs):
    frame = nmrun.table(
        outputs,
        rows="recipe",
        cols="metric",
        metric=["test/accuracy", "seconds"],
        filter="optimizer.lr=0.001",
    )
    values = frame.pivot(index="recipe", columns="metric", values="mean")
    assert values.loc["step", "seconds"] == 2.5
    assert values.loc["step", "test/accuracy"] == pytest.approx(0.821)


def test_a_plot_shows_the_means(outputs):
    figure = nmrun.plot(outputs, rows="recipe,optimizer.lr")
    (axes,) = figure.axes
    heights = sorted(
        float(y) for line in axes.lines for y in line.get_ydata() if len(line.get_ydata()) == 1
    )
    for mean in (82.1, 82.3):
        assert any(y == pytest.approx(mean) for y in heights)
    with pytest.raises(ConfigError, match=r"^kind=curvs: no such kind; did you mean curves\?"):
        nmrun.plot(outputs, kind="curvs")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        nmrun.plot(outputs, kind="curves", rows="recipe,optimizer.lr")


def test_several_figures_are_refused(outputs, write):
    write("step", "2:8", 0, 0.5, dataset__name="cifar10")
    with pytest.raises(ConfigError, match="these are 2 figures"):
        nmrun.plot(outputs, rows="recipe,optimizer.lr")
    assert nmrun.plot(outputs, filter="dataset=cifar10").axes


@pytest.mark.slow
def test_a_plot_leaves_pyplot_alone(outputs):
    """A notebook has chosen its backend before."""
    code = (
        "import sys, matplotlib; matplotlib.rcParams['backend'] = 'svg'; import nmrun; "
        f"nmrun.plot({str(outputs)!r}, rows='recipe,optimizer.lr').savefig('plot.png'); "
        "assert matplotlib.get_backend() == 'svg'; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=outputs)
    assert (outputs / "plot.png").read_bytes().startswith(b"\x89PNG")
