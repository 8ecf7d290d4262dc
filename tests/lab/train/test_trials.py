"""T-SR-STE's decay factor by the flip-rate ratio: the rates against a training loop of their own,
the choice against brute force.

Budgets of seconds: the plan from hand-made times, and runs that keep to their plan.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import transposable
from runs import Killed, config, finished, result_of, stopped
from torch import nn

from nmrun.errors import ConfigError
from nmrun.lab.train import runner, trials
from nmrun.lab.train.build import build
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Evaluation, Loop
from nmrun.lab.train.steps import TrainingSteps
from nmrun.lab.train.trials import GRID, Probe, find_decay
from nmrun.lab.words import schema
from nmrun.lab.words.identity import run_folder

MODEL = ("model=mlp", "model.hidden=[16,16,16]", "optimizer.lr=0.02")
AUTO = ("recipe=t_sr_ste", "recipe.decay=auto", *MODEL)


# --- the flip rate of a probe ---------------------------------------------------------------------


def reference_rate(
    dense_config: schema.Config, decay: float | None, interval: int, steps: int
) -> float:
    """A plain loop with STE, ``grad + decay * (1 - m) * w`` and Adam; ``decay`` None trains
    densely, with the masks looking on.
    """
    parts = build(dense_config)
    layers = list(parts.model.inner)
    adam = torch.optim.Adam(parts.model.parameters(), dense_config.optimizer.lr)
    masks = [transposable(layer.weight.detach()) for layer in layers]
    flips = refreshes = 0
    for step in range(steps):
        ((images, labels),) = parts.task.micro_batches(
            *divmod(step, parts.task.batches_per_epoch), 1
        )
        dense = [layer.weight.detach().clone() for layer in layers]
        if decay is not None:
            for layer, mask in zip(layers, masks, strict=True):
                layer.weight.data *= mask
        nn.functional.cross_entropy(parts.model(images), labels).backward()
        for layer, mask, weight in zip(layers, masks, dense, strict=True):
            layer.weight.data = weight
            if decay is not None:
                layer.weight.grad += decay * (1 - mask) * weight
        adam.step()
        adam.zero_grad()
        if (step + 1) % interval == 0:
            before, masks = masks, [transposable(layer.weight.detach()) for layer in layers]
            flips += sum(int((a != b).sum()) for a, b in zip(before, masks, strict=True))
            refreshes += 1
    return flips / refreshes / sum(layer.weight.numel() for layer in layers)


@pytest.mark.parametrize(
    ("epochs", "interval", "steps"), [(60, 3, 18), (4, 5, 10)]
)  # a tenth of the run, or two intervals
@pytest.mark.parametrize("decay", [None, 0.0, 6e-2])
def test_the_rate_is_that_of_a_plain_loop(tmp_path, decay, epochs, interval, steps):
    words = (*MODEL, f"trainer.epochs={epochs}")
    cfg = config(tmp_path, *AUTO, words[-1], f"recipe.interval={interval}")
    rate = trials.probe(cfg, decay or 0.0, dense=decay is None).flip_rate
    assert rate > 0.01
    assert rate == pytest.approx(
        reference_rate(config(tmp_path, "recipe=dense", *words), decay, interval, steps), rel=1e-9
    )


# --- which decay is taken -------------------------------------------------------------------------


def outside(mu: float) -> float:
    return max(0.60 - mu, mu - 0.95, 0.0)


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("centre", range(-6, 15))
def test_the_choice_is_that_of_trying_them_all(tmp_path, monkeypatch, centre, slope):
    """The ratio falls as the decay grows. Of the decays in range the one nearest to 2e-4, else the
    one nearest to the range.
    """
    mus = {decay: 0.8 * 2.0 ** (slope * (centre - i)) for i, decay in enumerate(GRID)}
    tried = []

    def probe(cfg, decay, dense):
        tried.append(decay)
        return Probe(0.01 if dense else 0.01 * mus[decay], {"training_hardware": 2})

    monkeypatch.setattr(trials, "probe", probe)
    choice, event, _, used = find_decay(config(tmp_path, *AUTO))
    assert used == {"training_hardware": 2 * len(tried)}
    start = GRID.index(2e-4)
    assert choice == min(GRID, key=lambda d: (outside(mus[d]), abs(GRID.index(d) - start)))
    assert len(tried) == len(set(tried[1:])) + 1  # the dense probe, and no decay twice
    assert f"decay {choice:g}" in event
    assert ("none is in [0.6, 0.95]" in event) == (outside(mus[choice]) > 0)


def test_the_grid_covers_the_decays_of_the_paper():
    assert {6e-6, 6e-5, 2e-4, 6e-3} <= set(GRID)
    steps = [b / a for a, b in itertools.pairwise(GRID)]
    assert all(2.9 < step < 3.4 for step in steps)


def test_masks_that_never_flip_tell_nothing(tmp_path):
    decay, event, *_ = find_decay(
        config(tmp_path, *AUTO, "optimizer.lr=1e-12", "recipe.interval=3")
    )
    assert decay == 2e-4
    assert "no mask flips" in event


# --- the run --------------------------------------------------------------------------------------


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_trains_with_what_was_found_and_goes_on_with_it(tmp_path, monkeypatch):
    def compose(name, decay):
        return config(
            tmp_path / name, "recipe=t_sr_ste", f"recipe.decay={decay}", *MODEL, "recipe.interval=3"
        )

    auto = compose("auto", "auto")
    decay, event, seconds, flops = find_decay(auto)
    monkeypatch.setattr(
        trials, "find_decay", lambda *run: find_decay(*run)._replace(seconds=1000.0)
    )
    result = finished(auto)
    assert [e["sentence"] for e in result["events"]] == [event]
    assert result["config"]["recipe"]["decay"] == "auto"  # so that the same command is the same run
    explicit = compose("given", repr(decay))
    plain = runner.run(explicit, run_folder(explicit))
    assert plain["events"] == []
    assert weights(run_folder(auto)) == weights(run_folder(explicit))

    # the search is part of what the run took, and the run's own dense steps are what they were
    assert seconds > 0
    assert result["seconds"] > 1000 > plain["seconds"]
    for kind in ("arithmetic", "hardware"):
        name = f"training_{kind}"
        assert result["flops"][name] == plain["flops"][name] + flops[name]
    assert result["flops"]["training_dense"] == plain["flops"]["training_dense"]

    cut = compose("cut", "auto")
    step = TrainingSteps.train_step
    died = []

    def dies(loop, epoch, index, measure_flips):
        if loop.updates == 7:
            died.append(loop.step)
            raise Killed
        step(loop, epoch, index, measure_flips)

    monkeypatch.setattr(TrainingSteps, "train_step", dies)
    with pytest.raises(Killed):
        runner.run(cut, run_folder(cut))
    monkeypatch.setattr(TrainingSteps, "train_step", step)
    monkeypatch.setattr(trials, "find_decay", lambda *run: pytest.fail("it is searched for once"))
    resumed = runner.run(cut, run_folder(cut))
    assert died == [7]
    assert [e["sentence"] for e in resumed["events"]] == [event]
    assert resumed["flops"] == result["flops"]
    assert resumed["seconds"] > 1000
    assert weights(run_folder(cut)) == weights(run_folder(auto))
    assert result_of(run_folder(cut))["status"] == "finished"


def test_the_flops_of_a_probe_are_those_of_its_steps(tmp_path):
    """All dense, the 12 FLOPs of a weight and item but for the first layer's input gradient; at 2:4
    a third of those of sparse layers, two products of three, are halved.
    """
    cfg = config(tmp_path, *AUTO, "recipe.interval=5")
    dense, sparse = (trials.probe(cfg, 0.0, dense=each).flops for each in (True, False))
    items = 10 * 32  # two intervals of batches
    first, inner, head = 64 * 16, 2 * 16 * 16, 16 * 10
    assert dense == dict.fromkeys(
        ("training_arithmetic", "training_hardware"), items * (4 * first + 6 * (inner + head))
    )
    halved = dense["training_arithmetic"] - items * 2 * inner
    assert sparse["training_arithmetic"] == halved


# --- a budget of seconds ---------------------------------------------------------------------------


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
    first, second = (weights(run_folder(one)) for one in configs)
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
    with pytest.raises(
        ConfigError,
        match=r"^trainer.budget=seconds:0.03: that is 0.33 epochs; it takes one epoch or more$",
    ):
        trials.steps_of_budget(cfg)
    more = config(tmp_path, "recipe=ste", "trainer.budget=seconds:0.3", "trainer.average=5")
    with pytest.raises(ConfigError, match=r"that is 3.3 epochs, fewer than trainer.average=5$"):
        trials.steps_of_budget(more)
