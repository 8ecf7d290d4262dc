"""What a run shows: a bar at any width, figures that are whole, and plain lines elsewhere."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console as Rich
from runs import config, rows

from nmrun.lab import tasks
from nmrun.lab.tasks.base import evaluating
from nmrun.lab.train import plan, progress, runner
from nmrun.lab.train.console import Console
from nmrun.lab.train.display import Display, Evaluated, Status
from nmrun.lab.words.identity import run_folder

FACTS = [
    ("train loss", "1.7971"),
    ("val accuracy", "0.8550"),
    ("val loss", "0.4031"),
    ("lr", "1.00e-03"),
    ("", "54 steps/s"),
    ("", "3.46k items/s"),
    ("", "12.5 GB GPU"),
]
STATUS = Status(190, 432, ["epoch 3/12", "dense"], FACTS, 12.4, 7325.0)


def drawn(display: Display, width: int) -> list[str]:
    file = io.StringIO()
    rich = Rich(
        file=file, width=width, force_terminal=True, color_system="standard", no_color=False
    )
    rich.print(display)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_bar_stays_and_no_figure_is_cut(width: int) -> None:
    display = Display(STATUS)
    display.evaluated = Evaluated("validating", 34, 79)
    first, *figures, last = drawn(display, width)
    assert all(len(line) <= width for line in (first, *figures, last))
    assert len(re.findall("[━╸╺]", first)) >= 10
    assert " 44%" in first
    if width >= 80:
        assert "epoch 3/12  dense" in first
        assert "190/432  0:12 < 2:02:05" in first
    said = "  ".join(line.strip() for line in figures)
    assert said == "  ".join(f"{label} {value}".strip() for label, value in FACTS)
    assert last.strip().startswith("validating")
    assert last.strip().endswith("34/79")
    assert len(figures) == {40: 3, 60: 2, 80: 2, 120: 1, 200: 1}[width]


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def coloured() -> bool:
        file = io.StringIO()
        Rich(file=file, width=80, force_terminal=True).print(Display(STATUS))
        return "\x1b[" in file.getvalue() and ";36m" in file.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()


@pytest.mark.parametrize(
    ("steps", "said"),
    [(54.4, "54 steps/s"), (3.25, "3.2 steps/s"), (0.5, "2 s/step"), (0.013, "76.9 s/step")],
)
def test_speed_in_words(steps: float, said: str) -> None:
    assert progress.facts({"steps_per_second": steps}, "accuracy") == [("", said)]


def test_the_display_is_for_terminals_and_the_log_is_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    live = Console(tmp_path / "run.log")
    live.progress(lambda: STATUS)
    live._drawn += 3600  # however long this machine takes
    live.progress(lambda: pytest.fail("too soon after the last one to be drawn"))
    live._drawn = 0.0
    with live.evaluation("validating"):
        evaluating.get()(3, 7)
    assert evaluating.get() is None
    live.say("a line", style="red")
    shown = capsys.readouterr().out
    assert "epoch 3/12" in shown
    assert "3/7" in shown
    assert "\x1b[31ma line" in shown
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    plain = Console(tmp_path / "run.log", brief=True)
    plain.progress(lambda: pytest.fail("no terminal, no display"))
    plain.detail("a detail", style="red")
    assert capsys.readouterr().out == ""
    assert (tmp_path / "run.log").read_text() == "a line\na detail\n"


def test_an_epoch_s_line_has_its_mean_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all its steps, wherever the rows of the log end."""
    every = config(tmp_path / "every", "recipe=ste", "trainer.log_every=1")
    runner.run(every, run_folder(every))
    losses = [row["train/loss"] for row in rows(run_folder(every))]
    means = [sum(losses[start : start + 3]) / 3 for start in range(0, 12, 3)]
    capsys.readouterr()
    some = config(tmp_path / "some", "recipe=ste", "trainer.log_every=5")
    runner.run(some, run_folder(some))
    lines = [line for line in capsys.readouterr().out.splitlines() if "train loss" in line]
    for number, (line, mean) in enumerate(zip(lines, means, strict=True), 1):
        assert line.startswith(f"  epoch {number}/4  sparse  train loss {mean:.4f}  val accuracy ")
        assert len(line) < 80


def test_alike_layers_are_one_line() -> None:
    told = [("sparse", f"h.{block}.attn.qkv.weight", (1536, 512), "2:4") for block in range(6)]
    told += [
        ("sparse", "h.0.mlp.weight", (512, 2048), "2:4"),
        ("dense", "head.weight", (65, 512), "excluded"),
    ]
    assert plan.layers(told) == [
        "sparse  6 x h.*.attn.qkv.weight  1536x512  2:4",
        "sparse  h.0.mlp.weight           512x2048  2:4",
        "dense   head.weight              65x512    excluded",
    ]
    other = [("sparse", f"layer{number}.conv2.weight", (8, 8), "2:4") for number in (1, 2)]
    assert plan.layers(other) == ["sparse  2 x layer*.conv2.weight  8x8  2:4"]
    assert plan.layers([]) == []


# --- the end of a run -----------------------------------------------------------------------------


@pytest.mark.parametrize("average", [1, 2])
def test_no_split_is_evaluated_twice_with_the_same_weights(
    average: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the weights are on the disk before the test split is looked at."""
    from nmrun.lab.tasks.vision import Classification

    seen: list[tuple[str, int]] = []
    evaluate = Classification.evaluate
    made = config(tmp_path, "recipe=ste", f"trainer.average={average}")
    folder = run_folder(made)

    def counted(task: Any, model: Any, split: str) -> dict[str, float]:
        bits = hash(tuple(p.detach().double().sum().item() for p in model.parameters()))
        seen.append((split, bits))
        if split == "test":
            assert (folder / "model.safetensors").exists()
            assert (folder / "best.safetensors").exists()
        return evaluate(task, model, split)

    monkeypatch.setattr(Classification, "evaluate", counted)
    outcome = runner.run(made, folder)
    assert outcome["status"] == "finished"
    assert len(set(seen)) == len(seen)
    assert [split for split, _ in seen[:4]] == ["val"] * 4
    final, best = outcome["metrics"]["final"], outcome["metrics"]["best"]
    if average == 1:
        assert final["eval/accuracy"] == rows(folder)[-1]["eval/accuracy"]
        same = best["epoch"] == 4
        assert [split for split, _ in seen[4:]] == ["test"] * (1 if same else 2)
    assert outcome["seconds"] >= outcome["training_seconds"]


def test_a_limited_evaluation_is_of_so_many_items(tmp_path: Path) -> None:
    """Evenly from the whole split; training images stay."""
    whole = config(tmp_path, "recipe=ste")
    some = config(tmp_path, "recipe=ste", "trainer.limit_evaluation=50")
    one, other = (tasks.build(made, torch.device("cpu")) for made in (whole, some))
    for split in ("val", "test"):
        images, labels = other.splits[split]
        distance = math.ceil(len(one.splits[split][1]) / 50)
        assert 25 < len(labels) <= 50
        assert torch.equal(images, one.splits[split][0][::distance])
        assert torch.equal(labels, one.splits[split][1][::distance])
    assert torch.equal(one.splits["train"][0], other.splits["train"][0])
    assert run_folder(whole).name != run_folder(some).name
