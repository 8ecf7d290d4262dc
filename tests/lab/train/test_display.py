"""What a run shows: a bar at any width, figures that are whole, and plain lines elsewhere."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
import torch
from runs import config, rows
from terminal import Terminal

from nmrun.lab import tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.tasks.base import evaluating
from nmrun.lab.train import console, runner
from nmrun.lab.train.console import Console

FIGURES = "train loss 1.7971  val accuracy 0.8550  val loss 0.4031  lr 1.00e-03  54.4 steps/s"
NOW = ("epoch 3/12  dense", 190, 432, FIGURES)
WIDTHS = (40, 60, 80, 120, 160)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(width: int) -> Terminal:
        screen = Terminal(monkeypatch, width)
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return make


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_is_cut(width, terminal):
    """Whatever the terminal's width."""
    screen = terminal(width)
    console = Console(None)
    console.draw(*NOW)
    lines = screen.lines()
    assert set(FIGURES.split()) <= set(" ".join(lines).split())
    if width >= 80:
        assert re.fullmatch("epoch 3/12  dense [━╸╺]{10,} 190/432 0:00:00 -:--:--", lines[0])
    console.clear()
    assert screen.lines() == [""]


def test_an_evaluation_has_a_bar_of_its_own(terminal):
    screen = terminal(80)
    console = Console(None)
    console.draw(*NOW)
    with console.evaluation("validating"):
        evaluating.get()(34, 79)
        assert re.match("validating +━+╸?╺?━+ +34/79", screen.lines()[1])
    assert evaluating.get() is None


@pytest.mark.parametrize("width", WIDTHS)
def test_lines_break_at_words(width, terminal, tmp_path):
    """And only on a terminal; a path that is longer than a line stays whole."""
    screen = terminal(width)
    console = Console(tmp_path / "run.log")
    sentence = (
        "  masks only, nothing is accelerated: small networks are left alone by nmrun, always"
    )
    path = "outputs/" + 30 * "deep/"
    console.say(sentence)
    console.say(f"  {path}", style="yellow")
    lines = screen.lines()
    last = next(number for number, line in enumerate(lines) if "outputs/" in line)
    assert [word for line in lines[:last] for word in line.split()] == sentence.split()
    assert {line[:2] for line in lines[:last]} == {"  "}
    assert screen.colour(last, "outputs/") == "brown"
    assert "".join(lines[last:]).strip() == path
    assert (tmp_path / "run.log").read_text() == f"{sentence}\n  {path}\n"


def test_no_colours_where_they_are_not_wanted(terminal, monkeypatch):
    screen = terminal(80)
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(None)
    console.draw(*NOW)
    console.say("a line", style="red")
    assert screen.lines()[0] == "a line"
    assert screen.lines()[1].startswith(NOW[0])
    console.clear()
    assert screen.lines() == ["a line"]
    assert screen.colour(0, "a line") == "default"


def test_no_terminal_no_display(tmp_path, capsys):
    plain = Console(tmp_path / "run.log", brief=True)
    assert not plain.due()
    plain.detail("a detail", style="red")
    assert capsys.readouterr().out == ""
    assert (tmp_path / "run.log").read_text() == "a detail\n"


def test_the_line_of_an_epoch(tmp_path, capsys):
    """It has the last loss that was logged, and the best epoch so far is marked."""
    cfg = config(tmp_path, "recipe=ste", "trainer.epochs=10", "optimizer.lr=0.02")
    runner.run(cfg, run_folder(cfg))
    lines = [line for line in capsys.readouterr().out.splitlines() if "train loss" in line]
    losses, scores = dict[int, float](), list[float]()
    for row in rows(run_folder(cfg)):
        losses |= {row["epoch"]: row["train/loss"]} if "train/loss" in row else {}
        scores += [row["eval/accuracy"]] if "eval/accuracy" in row else []
    for number, line in enumerate(lines[-len(losses) :], 11 - len(lines)):
        assert line.startswith(f"  epoch {number:2}/10  sparse  train loss ")
        assert number not in losses or f"train loss {losses[number]:.4f}" in line
        assert len(line) <= 80
        best = scores[number - 1] > max(scores[: number - 1], default=0)
        assert line.endswith("  best") is best


def test_alike_layers_are_one_line():
    layers = [("sparse", f"h.{block}.attn.qkv.weight", (1536, 512), "2:4") for block in range(6)]
    layers += [
        ("sparse", "h.0.mlp.weight", (512, 2048), "2:4"),
        ("dense", "head.weight", (65, 512), "excluded"),
    ]
    assert console.layer_lines(layers) == [
        "sparse  6 x h.*.attn.qkv.weight  1536x512  2:4",
        "sparse  h.0.mlp.weight           512x2048  2:4",
        "dense   head.weight              65x512    excluded",
    ]
    other = [("sparse", f"layer{number}.conv2.weight", (8, 8), "2:4") for number in (1, 2)]
    assert console.layer_lines(other) == ["sparse  2 x layer*.conv*.weight  8x8  2:4"]
    assert console.layer_lines([]) == []


# --- the end of a run -----------------------------------------------------------------------------


@pytest.mark.parametrize("average", [1, 2])
def test_no_split_is_evaluated_twice_with_the_same_weights(average, tmp_path, monkeypatch):
    """And the weights are on the disk before the test split is looked at."""
    from nmrun.lab.tasks.vision import Classification

    seen: list[tuple[str, int]] = []
    evaluate = Classification.evaluate
    cfg = config(tmp_path, "recipe=ste", f"trainer.average={average}")
    folder = run_folder(cfg)

    def counted(task, model, split):
        bits = hash(tuple(p.detach().double().sum().item() for p in model.parameters()))
        seen.append((split, bits))
        if split == "test":
            assert (folder / "model.safetensors").exists()
            assert (folder / "best.safetensors").exists()
        return evaluate(task, model, split)

    monkeypatch.setattr(Classification, "evaluate", counted)
    outcome = runner.run(cfg, folder)
    assert outcome["status"] == "finished"
    assert len(set(seen)) == len(seen)
    assert [split for split, _ in seen[:4]] == ["val"] * 4
    final, best = outcome["metrics"]["final"], outcome["metrics"]["best"]
    if average == 1:
        assert final["eval/accuracy"] == rows(folder)[-1]["eval/accuracy"]
        same = best["epoch"] == 4
        assert [split for split, _ in seen[4:]] == ["test"] * (1 if same else 2)
    assert outcome["seconds"] >= outcome["training_seconds"]


def test_a_limited_evaluation_is_of_so_many_items(tmp_path):
    """Evenly from the whole split; training images stay."""
    whole = config(tmp_path, "recipe=ste")
    some = config(tmp_path, "recipe=ste", "trainer.limit_evaluation=50")
    one, other = (tasks.build(cfg, torch.device("cpu")) for cfg in (whole, some))
    for split in ("val", "test"):
        images, labels = other.splits[split]
        distance = math.ceil(len(one.splits[split][1]) / 50)
        assert 25 < len(labels) <= 50
        assert torch.equal(images, one.splits[split][0][::distance])
        assert torch.equal(labels, one.splits[split][1][::distance])
    assert torch.equal(one.splits["train"][0], other.splits["train"][0])
    assert run_folder(whole).name != run_folder(some).name


def test_layers_of_several_ratios_hold_those(tmp_path, capsys):
    ratios = "sparsity.overrides={inner.0: 1:4}"
    cfg = config(tmp_path, "recipe=ste", ratios, "trainer.epochs=1", "trainer.limit_evaluation=8")
    runner.run(cfg, run_folder(cfg))
    assert "; 1:4, 2:4 hold in 2 of 2 layers; " in capsys.readouterr().out
