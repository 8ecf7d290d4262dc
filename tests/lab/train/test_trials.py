"""Budgets of seconds: the plan from hand-made times, and runs that keep to their plan."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from runs import config, finished, stopped

from nmrun.errors import ConfigError
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import runner
from nmrun.lab.train import steps as trials
from nmrun.lab.train.build import build
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Evaluation, Loop
from nmrun.lab.train.steps import TrainingSteps

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
            dense = loop.parts.handle.phase == "dense"
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


def test_phases_count_by_their_length_without_their_first_steps():
    dense = [("dense", s) for s in (50.0, 4.0, 4.0, 1.0, 2.0, 3.0)]
    assert trials.mean_by_phase(dense) == 2.0
    sparse = [("sparse", s) for s in (90.0, 5.0)]
    assert trials.mean_by_phase(dense + sparse) == (6 * 2.0 + 2 * 5.0) / 8
    assert trials.mean_by_phase([("sparse", 7.0)]) == 7.0


@pytest.mark.parametrize(
    ("recipe", "seconds"), [("dense", DENSE), ("ste", SPARSE), ("asp", (DENSE + SPARSE) / 2)]
)
def test_the_steps_that_fill_the_budget(recipe, seconds, clock, tmp_path):
    """ASP is dense for the first half of any run, so its steps cost the mean of both."""
    steps, event = trials.steps_of_budget(config(tmp_path, f"recipe={recipe}", BUDGET))
    assert steps == pytest.approx(2 / seconds, rel=0.04)
    assert event.startswith(f"{steps} steps of ")
    assert "fill trainer.budget=seconds:2.0" in event


def test_schedule_and_phases_end_with_the_budget(clock, tmp_path):
    cfg = config(tmp_path, "recipe=asp", BUDGET, "schedule=linear", "trainer.eval_every=1")
    result = finished(cfg)
    steps = result["steps"]
    assert any(f"{steps} steps of" in event["sentence"] for event in result["events"])
    last = [json.loads(line) for line in (run_folder(cfg) / "metrics.jsonl").open()][-1]
    assert last["step"] == steps
    assert last["lr"] == pytest.approx(cfg.optimizer.lr / steps)  # of the step before the last: 0
    spent = result["training_seconds"]
    assert spent == pytest.approx(2.0, rel=0.05)
    assert result["seconds"] > spent + EVALUATION + FIRST
    loop = Loop(cfg, build(cfg, steps), Console(None), "0123456789")
    assert loop.handle.recipe.dense_steps == round(steps / 2)
    assert sum(result["flops"].values()) > 0


def test_the_trial_leaves_no_trace_and_a_plan_gives_the_same_bits(clock, monkeypatch, tmp_path):
    words = ("recipe=maskllm", "trainer.budget=seconds:0.5")
    configs = [config(tmp_path / name, *words) for name in ("a", "b")]
    steps = finished(configs[0])["steps"]
    monkeypatch.setattr(trials, "steps_of_budget", lambda config: (steps, "as before"))
    finished(configs[1])
    first, second = ((run_folder(one) / "model.safetensors").read_bytes() for one in configs)
    assert first == second


@pytest.mark.parametrize("recipe", ["step", "t_sr_ste"])
def test_a_resumed_run_keeps_its_number_of_steps(recipe, monkeypatch, tmp_path):
    configs = [
        config(tmp_path / name, f"recipe={recipe}", BUDGET, "schedule=cosine")
        for name in ("whole", "cut")
    ]
    monkeypatch.setattr(trials, "steps_of_budget", lambda config: (14, "14 steps"))
    whole = runner.run(configs[0], run_folder(configs[0]))
    assert whole["steps"] == 14
    stopped(configs[1], 5)
    monkeypatch.setattr(trials, "steps_of_budget", lambda config: pytest.fail("it is planned once"))
    resumed = runner.run(configs[1], run_folder(configs[1]))
    assert resumed["status"] == "finished"
    assert resumed["steps"] == 14
    assert resumed["metrics"] == whole["metrics"]
    weights = [(run_folder(one) / "model.safetensors").read_bytes() for one in configs]
    assert weights[0] == weights[1]


def test_a_recipe_that_needs_more_steps_gets_a_longer_trial(monkeypatch, clock, tmp_path):
    lengths: list[int | None] = []

    def noted(config, total_steps):
        lengths.append(total_steps)
        if total_steps is not None and total_steps < 50:
            raise ConfigError("too few steps for the phases")
        return build(config, total_steps)

    monkeypatch.setattr(trials, "build", noted)
    trials.steps_of_budget(config(tmp_path, "recipe=ste", BUDGET))
    assert lengths == [None, 30, 60]
    with pytest.raises(ConfigError, match="too few steps for the phases"):
        trials.steps_of_budget(config(tmp_path, "recipe=ste", "trainer.budget=seconds:1"))


def test_less_than_an_epoch_is_refused_in_one_line(clock, tmp_path):
    cfg = config(tmp_path, "recipe=ste", "trainer.budget=seconds:0.03")
    with pytest.raises(ConfigError, match=r"^trainer.budget=seconds:0.03 is 0.33 epochs"):
        trials.steps_of_budget(cfg)
    more = config(tmp_path, "recipe=ste", "trainer.budget=seconds:0.3", "trainer.average=5")
    with pytest.raises(ConfigError, match=r"trainer.average=5: the run has 3.3 epochs"):
        trials.steps_of_budget(more)
