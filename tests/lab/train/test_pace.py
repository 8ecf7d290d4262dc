"""Budgets of seconds: the plan from hand-made times, and runs that keep to their plan."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from runs import config, stopping

from nmrun.errors import ConfigError
from nmrun.lab.train import runner, trials
from nmrun.lab.train.build import build
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Evaluation, Loop
from nmrun.lab.train.steps import TrainingSteps
from nmrun.lab.words.identity import identity, run_folder

BUDGET = "trainer.budget=seconds:2"
DENSE, SPARSE, EVALUATION, FIRST = 0.01, 0.03, 5.0, 9.0


class Clock:
    """A clock that stands still but for what the test lets take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.trained = 0  # steps of the loop at work
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        step, evaluate, build = (
            TrainingSteps.train_step,
            Evaluation.evaluate,
            TrainingSteps.__init__,
        )

        def init(loop: TrainingSteps, *args: Any) -> None:
            build(loop, *args)
            self.trained = 0

        def train_step(loop: TrainingSteps, *args: Any, **kwargs: Any) -> None:
            dense = loop.handle.phase == "dense"
            step(loop, *args, **kwargs)
            self.now += FIRST if self.trained == 0 else DENSE if dense else SPARSE
            self.trained += 1

        def evaluated(evaluation: Evaluation, split: str) -> dict[str, float]:
            self.now += EVALUATION
            return evaluate(evaluation, split)

        monkeypatch.setattr(TrainingSteps, "__init__", init)
        monkeypatch.setattr(TrainingSteps, "train_step", train_step)
        monkeypatch.setattr(Evaluation, "evaluate", evaluated)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_phases_count_by_their_length_without_their_first_steps() -> None:
    dense = [("dense", s) for s in (50.0, 4.0, 4.0, 1.0, 2.0, 3.0)]
    assert trials.mean_by_phase(dense) == 2.0
    sparse = [("sparse", s) for s in (90.0, 5.0)]
    assert trials.mean_by_phase(dense + sparse) == (6 * 2.0 + 2 * 5.0) / 8
    assert trials.mean_by_phase([("sparse", 7.0)]) == 7.0


@pytest.mark.parametrize(
    ("recipe", "seconds"), [("dense", DENSE), ("ste", SPARSE), ("asp", (DENSE + SPARSE) / 2)]
)
def test_the_steps_that_fill_the_budget(
    recipe: str, seconds: float, clock: Clock, tmp_path: Path
) -> None:
    """ASP is dense for the first half of any run, so its steps cost the mean of both."""
    steps, said = trials.steps_of_budget(config(tmp_path, f"recipe={recipe}", BUDGET))
    assert steps == pytest.approx(2 / seconds, rel=0.04)
    assert said.startswith(f"{steps} steps of ")
    assert "fill trainer.budget=seconds:2.0" in said


def test_schedule_and_phases_end_with_the_budget(clock: Clock, tmp_path: Path) -> None:
    made = config(tmp_path, "recipe=asp", BUDGET, "schedule=linear", "trainer.eval_every=1")
    result = runner.run(made, run_folder(made))
    assert result["status"] == "finished"
    steps = result["steps"]
    assert any(f"{steps} steps of" in event for event in result["events"])
    last = [json.loads(line) for line in (run_folder(made) / "metrics.jsonl").open()][-1]
    assert last["step"] == steps
    assert last["lr"] == pytest.approx(made.optimizer.lr / steps)  # of the step before the last: 0
    spent = result["training_seconds"]
    assert spent == pytest.approx(2.0, rel=0.05)
    assert result["seconds"] > spent + EVALUATION + FIRST
    loop = Loop(made, build(made, steps), Console(None))
    assert loop.handle.recipe.dense_steps == round(steps / 2)
    assert sum(result["flops"].values()) > 0


def test_the_trial_leaves_no_trace_and_a_plan_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = [config(tmp_path / name, "recipe=maskllm", BUDGET) for name in ("a", "b")]
    monkeypatch.setattr(trials, "SHORTEST", 4)
    monkeypatch.setattr(trials, "LONGEST", 4)
    trial, tried = trials._trial, itertools.count()

    def timed(*args: Any) -> tuple[float, int]:
        next(tried)
        return 2 / 15, trial(*args)[1]

    monkeypatch.setattr(trials, "_trial", timed)
    runner.run(made[0], run_folder(made[0]))
    assert next(tried) == 2
    monkeypatch.setattr(trials, "steps_of_budget", lambda config: (15, "as before"))
    runner.run(made[1], run_folder(made[1]))
    weights = [(run_folder(one) / "model.safetensors").read_bytes() for one in made]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("recipe", ["step", "t_sr_ste"])
def test_a_resumed_run_keeps_its_number_of_steps(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = [
        config(tmp_path / name, f"recipe={recipe}", BUDGET, "schedule=cosine")
        for name in ("whole", "cut")
    ]
    monkeypatch.setattr(trials, "steps_of_budget", lambda config: (14, "14 steps"))
    whole = runner.run(made[0], run_folder(made[0]))
    assert whole["steps"] == 14
    train = Loop.train

    monkeypatch.setattr(Loop, "train", stopping(train, 5))
    assert runner.run(made[1], run_folder(made[1]))["status"] == "interrupted"
    monkeypatch.setattr(Loop, "train", train)
    monkeypatch.setattr(trials, "steps_of_budget", lambda config: pytest.fail("it is planned once"))
    resumed = runner.run(made[1], run_folder(made[1]))
    assert resumed["status"] == "finished"
    assert resumed["steps"] == 14
    assert resumed["metrics"] == whole["metrics"]
    weights = [(run_folder(one) / "model.safetensors").read_bytes() for one in made]
    assert weights[0] == weights[1]


def test_a_recipe_that_needs_more_steps_gets_a_longer_trial(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, tmp_path: Path
) -> None:
    lengths: list[int | None] = []
    trial = trials._trial

    def noted(
        config: Any, total_steps: int | None, steps: int, log_every: int
    ) -> tuple[float, int]:
        lengths.append(total_steps)
        if total_steps is not None and total_steps < 50:
            raise ConfigError("too few steps for the phases")
        return trial(config, total_steps, steps, log_every)

    monkeypatch.setattr(trials, "_trial", noted)
    trials.steps_of_budget(config(tmp_path, "recipe=ste", BUDGET))
    assert lengths == [None, 30, 60]
    with pytest.raises(ConfigError, match="too few steps for the phases"):
        trials.steps_of_budget(config(tmp_path, "recipe=ste", "trainer.budget=seconds:1"))


def test_less_than_an_epoch_is_refused_in_one_line(clock: Clock, tmp_path: Path) -> None:
    made = config(tmp_path, "recipe=ste", "trainer.budget=seconds:0.03")
    with pytest.raises(
        ConfigError,
        match=r"^trainer.budget=seconds:0.03: that is 0.33 epochs; it takes one epoch or more$",
    ):
        trials.steps_of_budget(made)


def test_what_decides_the_speed_decides_the_run(tmp_path: Path) -> None:
    def of(*overrides: str) -> str:
        return identity(config(tmp_path, *overrides))

    assert of("trainer.budget=seconds:60") == of("trainer.budget=seconds:6e1")
    assert of(BUDGET) != of("trainer.budget=seconds:3")
    assert of(BUDGET, "trainer.threads=1") != of(BUDGET, "trainer.threads=2")
    assert of("trainer.threads=1") == of("trainer.threads=2")
