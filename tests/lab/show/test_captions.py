"""What stands above tables of runs that are not like others: pruned without training, or failed."""

from __future__ import annotations

import json
import math

import pytest
from runs import rewrite

TRAINING = ("adam", "Adam", "0.001", "epoch", "optimizer", "learning rate")


def pruned(write, method: str, seed: int, accuracy: float, samples: int = 128) -> None:
    """The run's config has the optimizer of the network that was pruned."""
    write(method, "2:4", seed, accuracy, recipe__samples=samples)


@pytest.mark.parametrize("style", ["markdown", "latex", "html"])
def test_of_what_was_pruned_in_one_shot_no_training_is_told(style, write, table):
    for seed in range(3):
        pruned(write, "wanda", seed, 0.8)
        pruned(write, "magnitude", seed, 0.7)
    text = table("--format", style, "--baseline", "magnitude")[1].split("<body>")[-1]
    assert "pruned in one shot with 128 calibration samples" in text
    assert not [word for word in TRAINING if word in text]


def test_beside_trainings_it_is_told_apart(write, table):
    pruned(write, "wanda", 0, 0.8)
    write("dense", "dense", 0, 0.9)
    write("sr_ste", "2:4", 0, 0.85)
    what = table()[1].splitlines()[0]
    assert what == (
        "small_conv on digits, adam, learning rate 0.001, 12 epochs, "
        "wanda pruned in one shot with 128 calibration samples"
    )
    assert "not the same" not in table()[1]
    # of other epochs there is one training alone
    write("ste", "2:4", 0, 0.85, trainer__epochs=3)
    assert "not the same in all cells: epochs\n" in table()[1]


def test_a_length_in_steps_is_told_in_steps(write, table):
    for recipe in ("ste", "sr_ste"):
        write(recipe, "2:4", 0, 0.85, trainer__steps=500)
    line = table()[1].splitlines()[0]
    assert line == "small_conv on digits, adam, learning rate 0.001, 500 steps"


def test_other_numbers_of_calibration_samples_are_no_common_one(write, table):
    pruned(write, "wanda", 0, 0.8)
    pruned(write, "magnitude", 0, 0.8, samples=8)
    assert (
        table()[1].splitlines()[0]
        == "small_conv on digits, pruned in one shot with calibration samples"
    )


@pytest.mark.parametrize("value", [None, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_a_failed_seed(value, write, table):
    """A result has null for such a number; one that another program wrote may have Infinity."""
    for seed in range(3):
        write("ste", "2:4", seed, 0.9 + seed / 100)
        write("asp", "2:4", seed, 0.8 + seed / 50)
    rewrite(write("ste", "2:4", 3, 0.5), metrics={"final": {"test/accuracy": value}, "best": {}})
    write("asp", "2:4", 3, 0.9)
    assert "| 91.0 +- 1.0 (3, 1 failed)" in table()[1].replace("**", "")
    line = next(
        row
        for row in json.loads(table("--format", "json", "--baseline", "asp")[1])
        if row["recipe"] == "ste"
    )
    # the others are compared: seeds 0 to 2, whose differences are 0.1, 0.09 and 0.08
    assert (line["n"], line["without"]) == (3, 1)
    assert line["difference"] == pytest.approx(0.09)
    assert r"$\mathbf{91.0}_{\pm 1.0}$ (3, 1 failed)" in table("--format", "latex")[1]


def test_settings_have_names_in_captions_and_no_keys(write, table):
    for seed in range(3):
        write("ste", "2:4", seed, 0.9, optimizer__lr=0.1, trainer__epochs=3)
        write("asp", "2:4", seed, 0.8)
    for style in ("markdown", "latex"):
        text = table("--format", style)[1]
        assert "in all cells: learning rate, epochs" in text
        assert "optimizer.lr" not in text
