"""What stands above tables of runs that are not like others: pruned without training, or failed."""

from __future__ import annotations

import json
import math

import pytest
import torch
from runs import rewrite

import nmrun

TRAINING = ("adam", "Adam", "0.001", "epoch", "optimizer", "learning rate")


def pruned(write, method: str, seed: int, accuracy: float, samples: int = 128) -> None:
    """The run's config has the optimizer of the network that was pruned."""
    write(method, "2:4", seed, accuracy, recipe__samples=samples)


@pytest.mark.parametrize("style", ["markdown", "latex"])
def test_of_what_was_pruned_in_one_shot_no_training_is_told(style, write, table):
    for seed in range(3):
        pruned(write, "wanda", seed, 0.8)
        pruned(write, "magnitude", seed, 0.7)
    text = table("--format", style, "--baseline", "magnitude")[1]
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
    # seeds 0 to 2 differ by 0.1, 0.09 and 0.08; the failed one counts as 0.9, as the worst of these
    assert (line["n"], line["without"]) == (3, 1)
    assert line["difference"] == pytest.approx((0.1 + 0.09 + 0.08 + 0.0) / 4)
    assert r"$\mathbf{91.0}_{\pm 1.0}$ (3, 1 failed)" in table("--format", "latex")[1]


def test_settings_have_names_in_captions_and_no_keys(write, table):
    for seed in range(3):
        write("ste", "2:4", seed, 0.9, optimizer__lr=0.1, trainer__epochs=3)
        write("asp", "2:4", seed, 0.8)
    for style in ("markdown", "latex"):
        text = table("--format", style)[1]
        assert "in all cells: learning rate, epochs" in text
        assert "optimizer.lr" not in text


def events_of(**settings: float | str) -> list[str]:
    """What STEP says when it switches, in 20 steps whose gradients are all equal to 1."""
    model = torch.nn.Linear(16, 16, bias=False)
    optimizer = nmrun.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.8))
    handle = nmrun.sparsify(
        model, optimizer, recipe="step", pattern="2:4", total_steps=20, exclude=None, **settings
    )
    for _ in range(20):
        model(torch.eye(16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [event.record for event in handle.pop_events()]


def test_runs_in_which_steps_rule_never_decided_are_told_apart(write, table):
    """The second moment's change is 0.2 * 0.8^t: its mean over five steps is 0.085 at step 10."""
    at_the_latest, by_the_rule, fixed = (
        events_of(),
        events_of(threshold=1e9),
        events_of(switch=0.2),
    )
    for recipe in ("dense", "step", "ste"):
        for seed in range(5):
            run = write(recipe, "dense" if recipe == "dense" else "2:4", seed, 0.9 + seed / 100)
            if recipe == "step":
                rewrite(run, events=by_the_rule if seed < 3 else at_the_latest)
    note = "STEP's rule decided its switch in 3 of 5 runs, t_max in 2"
    assert note in table()[1]
    assert note in table("--overall", "--baseline", "ste")[1]
    assert note in table("--format", "latex")[1].replace("\\_", "_")
    assert "STEP's rule" not in table("--filter", "seed=0,1,2")[1]
    assert "STEP's rule" not in table("--filter", "recipe=ste,dense")[1]
    for seed in range(5):
        rewrite(write("step", "1:4", seed, 0.9, recipe__switch=0.2), events=fixed)
    assert note in table("--rows", "recipe,recipe.switch")[1]


def test_of_a_switch_without_an_event_nothing_is_known(write, table):
    for seed in range(3):
        write("step", "2:4", seed, 0.9, recipe__switch="auto")
        write("dense", "dense", seed, 0.95)
    assert "not known whether STEP's rule decided its switch: 3 runs" in table()[1]


def test_runs_that_ended_otherwise_are_in_no_mean_and_counted(write, table):
    for seed in range(3):
        write("dense", "dense", seed, 0.95)
        write("ste", "2:4", seed, 0.9)
    write("ste", "2:4", 3, status="failed")
    write("ste", "2:4", 4, status="failed")
    write("dense", "dense", 4, 0.9, status="interrupted")
    text = table()[1]
    assert "2 runs failed, in no mean" in text
    assert "1 run interrupted, in no mean" in text


@pytest.mark.parametrize("others", [1, 2])
def test_seeds_far_apart_are_named_where_none_can_be_taken_for_failed(others, write, table):
    """With one other row there is no deviation to judge by; of two seeds neither is the median."""
    seeds = range(5 if others == 1 else 2)
    for seed in seeds:
        write("step", "2:4", seed, 0.1 if seed == 1 else 0.7, recipe__switch=0.5)
        for recipe in ("ste", "asp")[:others]:
            write(recipe, "2:4", seed, 0.7 + seed / 100)
    text = table()[1]
    assert "seeds far apart, of which some may have failed: step at 2:4 (10.0 to 70.0)" in text
    assert "may have failed" not in table("--filter", "recipe=ste,asp")[1]


def test_losses_far_apart_are_those_twice_as_large(write, table):
    for seed, loss in enumerate((0.5, 1.1, 0.6)):
        write("ste", "2:4", seed, 0.9, loss=loss)
        write("asp", "2:4", seed, 0.9, loss=min(loss, 0.99))
    assert "may have failed: ste at 2:4 (0.5 to 1.1)" in table("--metric", "test/loss")[1]


def test_other_seeds_are_said_and_rows_that_share_none_with_the_baseline(write, table):
    for seed in range(3):
        write("dense", "dense", seed, 0.95)
        write("ste", "2:4", seed, 0.9 + seed / 100)
        write("asp", "2:4", seed, 0.9 + seed / 50)
        write("s_ste", "2:4", seed + 5, 0.9)
    for arguments in (("--baseline", "ste"), ("--baseline", "ste", "--overall")):
        text = table(*arguments)[1]
        assert "no common seed with ste: s_ste at 2:4" in text
        assert "not the same in all cells: seeds" in text
    assert "seeds" not in table("--filter", "recipe=ste,asp,dense")[1].splitlines()[2]


def test_a_table_without_dense_runs_says_so(write, table):
    for seed in range(3):
        write("ste", "2:4", seed, 0.9)
        write("asp", "2:4", seed, 0.8)
    missing = "no dense run under these settings"
    assert missing in table()[1]
    for seed in range(3):
        write("dense", "dense", seed, 0.95)
    assert missing not in table()[1]
    # dense runs that were left out by their recipe are there all the same; those of another rate are none
    assert missing not in table("--filter", "recipe=ste,asp")[1]
    for seed in range(3):
        write("ste", "2:4", seed, 0.9, optimizer__lr=0.1)
    assert missing in table("--filter", "optimizer.lr=0.1")[1]
