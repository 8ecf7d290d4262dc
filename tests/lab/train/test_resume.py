"""A run that is cut off anywhere and started again ends with the same bits as one left alone."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    KINDS,
    RECIPES,
    Outcome,
    after_step,
    build_noisy,
    config,
    evaluations,
    finished,
    handled,
    kill,
    outcome,
    rows,
    signal_after,
    stopped,
)

from nmrun.lab import models, signals
from nmrun.lab.config.identity import run_folder
from nmrun.lab.config.schema import Config
from nmrun.lab.tasks.vision import Classification
from nmrun.lab.train import checkpoint, results, runner, steps
from nmrun.lab.train.loop import Evaluation
from nmrun.lab.train.steps import TrainingSteps
from nmrun.recipes.base import Recipe

# 12 steps, checkpoints after 3, 6, 9 and 12; STEP switches and ASP prunes after step 7
SWITCH = {
    "step": ("recipe.switch=0.58",),
    "asp": ("recipe.prune_at=0.58",),
    "sr_ste": ("optimizer=sgd", "optimizer.lr=0.05"),
}
EVERYTHING = (
    "trainer.accumulate=2",
    "trainer.clip=1.0",
    "schedule=cosine",
    "schedule.warmup=0.2",
    "optimizer.weight_decay=0.01",
)


@pytest.fixture(autouse=True)
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model of these tests has batch normalisation and dropout."""
    monkeypatch.setattr(models, "build", build_noisy)


def make(folder: Path, recipe: str, *overrides: str) -> Config:
    return config(
        folder,
        f"recipe={recipe}",
        "model.exclude=[stem,head.*]",
        *EVERYTHING,
        *SWITCH.get(recipe, ()),
        *overrides,
    )


_alone: dict[tuple[str, ...], Outcome] = {}


def left_alone(tmp_path: Path, *arguments: str) -> Outcome:
    if arguments not in _alone:
        _alone[arguments] = outcome(make(tmp_path / "alone", *arguments))
    return _alone[arguments]


def cuts() -> Iterator[Any]:
    """All pairs of a recipe and a step; by default all steps of STEP, and those around the change of
    two others' phases. Others are cut off within an epoch below, and all in test_resume_state.py.
    """
    for recipe, step in itertools.product(RECIPES, (2, 5, 7, 8, 11, 12)):
        default = recipe == "step" or (recipe in ("asp", "sdgf_stepwise") and step in (7, 8))
        yield pytest.param(recipe, step, marks=() if default else pytest.mark.minutes)


@pytest.mark.parametrize(("recipe", "step"), list(cuts()))
def test_killed_after_a_step(recipe, step, tmp_path):
    cfg = make(tmp_path, recipe)
    kill(cfg, TrainingSteps, "train_step", step)
    assert outcome(cfg) == left_alone(tmp_path, recipe)


def test_killed_where_rows_are_further_apart(tmp_path, monkeypatch):
    """In a long run a checkpoint lies between two rows: here after step 6, with rows at 4 and 8."""
    monkeypatch.setattr(steps, "MOST_ROWS", 4)
    alone = outcome(make(tmp_path / "alone", "step"))
    assert [row["step"] for row in alone.rows if "train/loss" in row] == [4, 8, 12]
    cfg = make(tmp_path, "step")
    kill(cfg, TrainingSteps, "train_step", 7)
    assert outcome(cfg) == alone


# at the level of sparsify all recipes are resumed by test_resume_state.py
FAST = ("step", "lbc", "sqft", "bi_mask")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS],
)
def test_checkpoints_within_an_epoch(recipe, tmp_path, monkeypatch, capsys):
    """One after each step loses no step to a kill, and changes no bit."""
    alone, cfg = left_alone(tmp_path, recipe), make(tmp_path, recipe)
    monkeypatch.setattr(checkpoint.CheckpointClock, "due", lambda _: True)
    kill(cfg, TrainingSteps, "train_step", 6)
    kill(cfg, TrainingSteps, "train_step", 6)
    assert outcome(cfg) == alone
    output = capsys.readouterr().out
    assert "goes on at step 5 of 12" in output
    assert "goes on at step 10 of 12" in output


@pytest.mark.parametrize("calls", [[3], [7], [4, 3, 1]])
def test_killed_where_patience_ends_the_run(calls, tmp_path, monkeypatch):
    """It looks every second step, and step 4 is the best: it has seen enough at step 8."""
    monkeypatch.setattr(Evaluation, "_is_best", lambda self, row: self.steps.step <= 4)
    monkeypatch.setattr(checkpoint.CheckpointClock, "due", lambda _: True)
    words = ("ste", "trainer.eval_every=2steps", "trainer.patience=2")
    alone, cfg = outcome(make(tmp_path / "alone", *words)), make(tmp_path, *words)
    assert [row["step"] for row in alone.rows if "eval/loss" in row] == [2, 4, 6, 8]
    for call in calls:
        kill(cfg, TrainingSteps, "train_step", call)
    assert outcome(cfg) == alone


@pytest.mark.parametrize("recipe", ["asp", "step"])
def test_killed_again_and_again(recipe, tmp_path):
    cfg = make(tmp_path, recipe)
    for _ in range(3):
        kill(cfg, TrainingSteps, "train_step", 4)  # three steps forward, one back
    assert outcome(cfg) == left_alone(tmp_path, recipe)


BY_STEPS = ("trainer.eval_every=5steps", "trainer.steps=11")


@pytest.mark.parametrize(
    ("words", "owner", "name", "call", "before"),
    [
        ((), os, "replace", 5, False),  # the last one has made room, the next is not yet written
        ((), os, "replace", 6, True),  # it is written, not yet in place
        ((), os, "replace", 6, False),
        ((), checkpoint, "save", 4, False),  # trained to the end, not evaluated
        ((), Evaluation, "evaluate", 5, False),
        ((), results, "save_weights", 1, False),
        (BY_STEPS, TrainingSteps, "train_step", 8, False),
        (BY_STEPS, Evaluation, "evaluate", 1, False),
        (BY_STEPS, Evaluation, "evaluate", 2, False),
    ],
)
def test_killed_at_an_awkward_moment(words, owner, name, call, before, tmp_path):
    alone, cfg = left_alone(tmp_path, "step", *words), make(tmp_path, "step", *words)
    evaluated = [row["step"] for row in alone.rows if "eval/loss" in row]
    assert evaluated == ([5, 10, 11] if words else [3, 6, 9, 12])
    kill(cfg, owner, name, call, before)
    assert outcome(cfg) == alone


@pytest.mark.parametrize(
    ("step", "numbers"),
    [
        (5, [signal.SIGINT]),
        (8, [signal.SIGTERM]),
        (5, [signal.SIGUSR1]),
        (7, [signal.SIGHUP]),  # a closed terminal
        (7, [signal.SIGXCPU] * 2),  # a limit of time, whose signal comes again each second
        (5, [signal.SIGTERM] * 2),  # of timeout(1), to the process and to its group
    ],
)
def test_a_signal_saves_between_epochs_too(step, numbers, tmp_path, monkeypatch):
    if signal.SIGXCPU in numbers:
        monkeypatch.setattr(signals, "ECHO", 0.0)
    cfg = make(tmp_path, "step")
    with signal_after(step, *numbers):
        result = runner.run(cfg, run_folder(cfg))
    assert (result["status"], result["signal"]) == ("interrupted", numbers[0])
    state = checkpoint.load(run_folder(cfg) / "checkpoint.pt")
    assert state["loop"]["step"] == step
    alone = left_alone(tmp_path, "step")
    assert result["flops"]["training_dense"] == alone.flops["training_dense"] * step / 12
    assert outcome(cfg) == alone


@pytest.mark.parametrize(
    ("owner", "name", "call", "step"),
    [
        (Classification, "evaluate", 1, 3),
        (Classification, "evaluate", 4, 12),  # of the last step
        (Classification, "evaluate", 5, 12),  # of the final weights, which are the best here
        (results, "save_weights", 1, 12),
        (results, "save_weights", 2, 12),
    ],
)
def test_a_signal_stops_evaluations_and_the_last_files(
    owner, name, call, step, tmp_path, monkeypatch
):
    """What was trained is saved, the row of the step that was evaluated is not lost."""
    cfg, original, calls = make(tmp_path, "step"), getattr(owner, name), 0

    def signalled(*args, **kwargs):
        nonlocal calls
        calls += 1
        torch.rand(1)  # an evaluation may draw
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("went on")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        result = runner.run(cfg, run_folder(cfg))
    assert (result["status"], result["signal"]) == ("interrupted", signal.SIGTERM)
    state = checkpoint.load(run_folder(cfg) / "checkpoint.pt")
    assert state["loop"]["step"] == step
    with monkeypatch.context() as patch:
        calls = -1000
        patch.setattr(owner, name, signalled)
        assert outcome(cfg) == outcome(make(tmp_path / "alone", "step"))


def test_a_row_that_a_signal_put_off_is_logged_once(tmp_path):
    words = ("trainer.eval_every=2steps",)
    cfg = make(tmp_path, "step", *words)
    with signal_after(4, signal.SIGTERM):  # in the midst of an epoch, before the evaluation
        assert runner.run(cfg, run_folder(cfg))["status"] == "interrupted"
    kill(cfg, TrainingSteps, "train_step", 1)  # the row is in the file, the checkpoint as before
    assert [row["step"] for row in rows(run_folder(cfg))] == [2, 4]
    assert outcome(cfg) == outcome(make(tmp_path / "alone", "step", *words))


def test_a_signal_comes_while_an_error_is_on_its_way(tmp_path, monkeypatch):
    """A process that reads data was told first, and its end is an error here."""

    def broken(*_, **__):
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGTERM)).start()
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    cfg = make(tmp_path, "ste")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingSteps, "train_step", broken)
        result = runner.run(cfg, run_folder(cfg))
    assert (result["status"], result["signal"]) == ("interrupted", signal.SIGTERM)
    assert "error" not in result
    assert outcome(cfg) == left_alone(tmp_path, "ste")


def test_a_launcher_s_handler_is_called_when_all_is_saved(tmp_path):
    """submitit's, for instance, which puts the job into the queue again and exits; others return."""
    cfg, saved = make(tmp_path, "step"), []

    def handler(number, frame):
        state = checkpoint.load(run_folder(cfg) / "checkpoint.pt")
        saved.append((number, state and state["loop"]["step"]))
        if number == signal.SIGUSR2:
            sys.exit(-1)

    with (
        handled(handler, signal.SIGTERM, signal.SIGUSR2),
        signal_after(5, signal.SIGTERM),
        signal_after(8, signal.SIGUSR2),
        pytest.raises(SystemExit),
    ):
        runner.run(cfg, run_folder(cfg))
    assert saved == [(signal.SIGTERM, 5), (signal.SIGUSR2, 8)]
    assert outcome(cfg) == left_alone(tmp_path, "step")


def test_a_process_that_a_run_has_forked_ends_as_ever(tmp_path):
    """A pool of a data set of one's own, which ends its processes by SIGTERM."""
    codes = list[int]()

    def fork(_):
        ready, child_end = os.pipe()
        child = os.fork()
        if not child:
            os.write(child_end, b".")  # Python forgets a signal that comes while it forks
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        codes.append(os.waitpid(child, 0)[1])

    cfg, alone = make(tmp_path, "ste"), left_alone(tmp_path, "ste")
    with after_step(5, fork):
        assert outcome(cfg) == alone
    assert codes == [signal.SIGTERM]


# --- damaged rows ---------------------------------------------------------------------------------


CHANGED = "metrics.jsonl: not the 4 rows that were logged; it was changed"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ((1, b'{"step": 3, "epo'), CHANGED),
        ((0, b"\0" * 40), CHANGED),
        ((3, None), CHANGED),
        ((1, "a digit"), CHANGED),
        ((9, b"\xff\xfe{"), ""),  # behind the checkpoint, where nothing counts
    ],
)
def test_a_damaged_row_is_lost_aloud_and_blocks_nothing(damage, message, tmp_path, capsys):
    cfg = make(tmp_path, "ste")
    kill(cfg, TrainingSteps, "train_step", 8)  # the checkpoint is of step 6
    metrics = run_folder(cfg) / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3, 4, 6]
    number, content = damage
    if content == "a digit":
        lines[number] = lines[number].replace(b'"epoch": 1', b'"epoch": 3')
    elif content is None:
        del lines[number]
    else:
        lines[number : number + 1] = [content]
    metrics.write_bytes(b"\n".join(lines) + b"\n")
    capsys.readouterr()
    result = finished(cfg)
    messages = [line.strip() for line in capsys.readouterr().out.splitlines() if "jsonl" in line]
    assert messages == ([message] if message else [])
    alone = left_alone(tmp_path, "ste")
    sentences = [event["sentence"] for event in result["events"]]
    told = [f"step 6: {text}" for text in messages]
    assert sentences == [*told, *(event["sentence"] for event in alone.events)]
    logged = rows(run_folder(cfg))
    assert len(logged) == len(alone.rows) - (message == CHANGED and content != "a digit")
    assert result["metrics"] == alone.metrics


def test_loss_scaling_goes_on_where_it_was(tmp_path):
    cfg = make(tmp_path, "sr_ste", "trainer.precision=fp16")
    kill(cfg, TrainingSteps, "train_step", 8)
    assert outcome(cfg) == left_alone(tmp_path, "sr_ste", "trainer.precision=fp16")


def test_random_state_of_all_generators(tmp_path):
    import numpy as np

    checkpoint.seed_everything(3)
    draw = lambda: (random.gauss(0, 1), float(np.random.normal()), float(torch.rand(())))  # noqa: E731
    draw()
    checkpoint.save(tmp_path / "state.pt", {"random": checkpoint.random_state()})
    expected = [draw() for _ in range(3)]
    checkpoint.seed_everything(4)
    state = checkpoint.load(tmp_path / "state.pt")
    checkpoint.restore_random_state(state["random"])
    assert [draw() for _ in range(3)] == expected


def test_resume_false_starts_over(tmp_path, capsys):
    cfg = make(tmp_path, "ste")
    kill(cfg, TrainingSteps, "train_step", 8)
    capsys.readouterr()
    assert outcome(make(tmp_path, "ste", "resume=false")) == left_alone(tmp_path, "ste")
    assert "goes on at" not in capsys.readouterr().out


def test_a_checkpoint_of_another_run_is_refused(tmp_path, capsys):
    """With its rows beside it nothing but its id shows that it is another seed's."""
    cfg, other = make(tmp_path, "ste"), make(tmp_path, "ste", "seed=1")
    for each in (cfg, other):
        kill(each, TrainingSteps, "train_step", 8)
    for name in ("checkpoint.pt", "checkpoint.previous.pt", "metrics.jsonl"):
        shutil.copy(run_folder(other) / name, run_folder(cfg) / name)
    result = runner.run(cfg, run_folder(cfg))
    ids = [folder.name.partition("-")[2] for folder in map(run_folder, (cfg, other))]
    assert result["status"] == "failed"
    assert all(part in result["error"] for part in (*ids, "force=true"))
    assert "Traceback" not in capsys.readouterr().err
    assert outcome(make(tmp_path, "ste", "force=true")) == left_alone(tmp_path, "ste")


@pytest.mark.parametrize("words", [(), ("resume=false",)])
def test_a_run_that_begins_anew_says_so(words, tmp_path, capsys):
    """Where it was killed before its first checkpoint, and nobody has asked for it."""
    cfg, message = (
        make(tmp_path, "ste", *words),
        "begins anew: it ended before its first checkpoint",
    )
    kill(cfg, TrainingSteps, "train_step", 2)
    assert message not in capsys.readouterr().out
    assert outcome(cfg) == left_alone(tmp_path, "ste")
    assert capsys.readouterr().out.count(message) == (not words)


def test_what_safetensors_leaves_of_a_killed_file_is_removed(tmp_path):
    for call in (2, 8):  # it begins anew, it is resumed
        cfg = make(tmp_path, "ste", f"seed={call}")
        kill(cfg, TrainingSteps, "train_step", call)
        (run_folder(cfg) / ".tmpa1B2c3").write_bytes(bytes(100))
        outcome(cfg)
        assert not list(run_folder(cfg).glob(".tmp*"))


def test_a_signal_that_the_parent_ignores_ends_nothing(tmp_path):
    """As of a command with ``&`` in a script, or under nohup."""
    ignored = (signal.SIGINT, signal.SIGHUP)
    with handled(signal.SIG_IGN, *ignored), signal_after(7, *ignored):
        finished(make(tmp_path, "ste"))
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in ignored)


def test_numbers_of_numpys_go_through_a_checkpoint(tmp_path, monkeypatch):
    """They are of a task's and a recipe's own code; a row is in one where a signal came before its
    evaluation."""
    evaluations(monkeypatch, map(np.float64, itertools.repeat(0.5)))
    monkeypatch.setattr(
        Recipe, "after_step", lambda recipe, *_: recipe.say("mine", norm=np.float32(0.25))
    )
    monkeypatch.setattr(Recipe, "metrics", lambda _: {"mine/norm": np.float32(0.25)})
    cfg = config(tmp_path, "recipe=ste")
    stopped(cfg, 6)
    assert checkpoint.load(run_folder(cfg) / "checkpoint.pt")["loop"]["row"]["mine/norm"] == 0.25
    events = [event for event in finished(cfg)["events"] if "norm" in event]
    assert [(event["step"], event["norm"]) for event in events] == [(n, 0.25) for n in range(1, 13)]
    assert "goes on at step 6" in (run_folder(cfg) / "run.log").read_text()
    assert {row.get("eval/accuracy", 0.5) for row in rows(run_folder(cfg))} == {0.5}
