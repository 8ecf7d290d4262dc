"""What stands above tables: what all runs have in common, and what is to be known of them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from runs import rewrite

import nmrun

TRAINING = ("adam", "Adam", "0.001", "epoch", "optimizer", "learning rate")
WANDA, MAGNITUDE = ("wanda", {"recipe__samples": 128}), ("magnitude", {"recipe__samples": 128})
RESNET = {"dataset": {"name": "cifar10", "train_size": 5000, "val_size": None, "flip": True}}


def resnet(depth: int) -> dict[str, object]:
    return RESNET | {"model": {"name": "resnet20", "depth": depth, "exclude": ["conv1"]}}


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([("ste", {"trainer__epochs": 1})], "small_conv on digits, adam, learning rate 0.001, 1 epoch"),
        ([("ste", {"trainer__steps": 500})], "small_conv on digits, adam, learning rate 0.001, 500 steps"),
        (
            [("ste", {"trainer__budget": "seconds:600.0"})],
            "small_conv on digits, adam, learning rate 0.001, budget seconds:600.0\n",
        ),
        (
            [("ste", {"trainer__budget": None}), ("asp", {"trainer__budget": "flops:dense"})],
            "small_conv on digits, adam, learning rate 0.001\n",
        ),
        (  # of a version without the key
            [("ste", {"trainer__budget": None}), ("asp", {})],
            "small_conv on digits, adam, learning rate 0.001, 12 epochs\n",
        ),
        ([WANDA, MAGNITUDE], "small_conv on digits, pruned in one shot with 128 calibration samples"),
        (
            [WANDA, ("magnitude", {"recipe__samples": 8})],
            "small_conv on digits, pruned in one shot with calibration samples",
        ),
        (
            [WANDA, ("sr_ste", {})],
            "small_conv on digits, adam, learning rate 0.001, 12 epochs, "
            "wanda pruned in one shot with 128 calibration samples",
        ),
        ([("ste", resnet(8)), ("sr_ste", resnet(8))], "resnet20 (depth=8) on cifar10 (train_size=5000), adam"),
        ([("ste", resnet(20)), ("sr_ste", resnet(20))], "resnet20 on cifar10 (train_size=5000), adam"),
        ([("ste", resnet(8)), ("sr_ste", resnet(20))], "resnet20 on cifar10 (train_size=5000), adam"),
    ],
)  # fmt: skip
def test_the_first_line_says_what_all_runs_have_in_common(runs, said, write, table):
    for recipe, settings in runs:
        write(recipe, "2:4", 0, 0.85, **settings)
    out = table()[1]
    assert out.startswith(said)
    assert "not the same" not in out or "model.depth" not in said


def test_a_length_that_is_a_column_is_in_no_title(write, table):
    for steps in (100, 200):
        write("ste", "2:4", 0, 0.9, trainer__steps=steps)
    out = table("--cols", "trainer.steps")[1]
    assert "steps=100" in out
    assert out.startswith("small_conv on digits, adam, learning rate 0.001\n")


@pytest.mark.parametrize("style", ["markdown", "latex"])
def test_of_what_was_pruned_in_one_shot_no_training_is_told(style, write, table):
    for seed in range(3):
        for recipe, settings in (WANDA, MAGNITUDE):
            write(recipe, "2:4", seed, 0.7 + len(recipe) / 100, **settings)
    text = table("--format", style, "--baseline", "magnitude")[1]
    assert "pruned in one shot with 128 calibration samples" in text
    assert not [word for word in TRAINING if word in text]


@pytest.mark.parametrize("value", [None, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_a_failed_seed(value, write, table):
    """A result has null for such a number; one that another program wrote may have Infinity."""
    for seed in range(3):
        write("ste", "2:4", seed, 0.9 + seed / 100)
        write("asp", "2:4", seed, 0.8 + seed / 50)
    rewrite(write("ste", "2:4", 3, 0.5), metrics={"final": {"test/accuracy": value}, "best": {}})
    write("asp", "2:4", 3, 0.9)
    assert "| 91.0 +- 1.0 (3, 1 failed)" in table()[1].replace("**", "")
    lines = json.loads(table("--format", "json", "--baseline", "asp")[1])
    (line,) = [row for row in lines if row["recipe"] == "ste"]
    # seeds 0 to 2 differ by 0.1, 0.09 and 0.08; the failed one counts as 0.9, as the worst of these
    assert (line["n"], line["without"]) == (3, 1)
    assert line["difference"] == pytest.approx((0.1 + 0.09 + 0.08 + 0.0) / 4)
    assert r"$\mathbf{91.0}_{\pm 1.0}$ (3, 1 failed)" in table("--format", "latex")[1]


@pytest.mark.parametrize("style", ["markdown", "latex"])
def test_settings_and_seeds_that_differ_have_names_and_no_keys(style, write, table):
    for seed in range(3):
        write("ste", "2:4", seed, 0.9, optimizer__lr=0.1, trainer__epochs=3)
        write("asp", "2:4", seed, 0.8)
        write("wanda", "2:4", seed, 0.7, trainer__epochs=5)  # which trained no epoch
    text = table("--format", style)[1]
    assert "ot the same in all cells: learning rate, epochs" in text
    assert "seeds" not in text.split("ot the same")[1].splitlines()[0]
    assert "optimizer.lr" not in text
    for seed in range(3):
        write("s_ste", "2:4", seed + 5, 0.9)
    assert "in all cells: learning rate, epochs, seeds" in table("--format", style)[1]


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
    for words in ((), ("--overall", "--baseline", "ste"), ("--format", "latex")):
        assert note in table(*words)[1].replace("\\_", "_")
    for words in ("seed=0,1,2", "recipe=ste,dense"):
        assert "STEP's rule" not in table("--filter", words)[1]
    for seed in range(5):
        rewrite(write("step", "1:4", seed, 0.9, recipe__switch=0.2), events=fixed)
    assert note in table("--rows", "recipe,recipe.switch")[1]
    for seed in range(3):
        write("step", "1:8", seed, 0.9, recipe__switch="auto")  # without an event
    assert "not known whether STEP's rule decided its switch: 3 runs" in table(
        "--filter", "sparsity=1:8"
    )[1]  # fmt: skip


def test_a_dense_seed_that_failed_counts_once_beside_several_ratios(write, table):
    """Though its cell stands in the column of each, it is no run that failed besides."""
    for seed in range(3):
        write("dense", "dense", seed, 0.98 + seed / 1000 if seed else 0.3)
        for ratio in ("2:4", "1:4", "1:8"):
            for recipe in ("ste", "sr_ste"):
                write(recipe, ratio, seed, 0.95 + seed / 1000)
    text = table()[1]
    assert text.count("(2, 1 failed)") == 3
    assert "1 seed failed" in text
    assert "in no mean" not in text


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
