"""TD3 with N:M sparse networks: which weights learn, when masks change, and what the targets
compute with.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from errors import one_line
from torch import Tensor, nn

pytest.importorskip("gymnasium")
import gymnasium

from examples import rnm_td3
from nmrun.lab.compare.runs import collect
from nmrun.lab.render import cli as report

STEPS, INTERVAL = 160, 15


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning begins after 40 steps, from batches of 16."""
    monkeypatch.setattr(rnm_td3, "WARM_UP", 40)
    monkeypatch.setattr(rnm_td3, "BATCH", 16)


def largest(weight: Tensor, n: int, m: int) -> Tensor:
    """The mask of the n largest magnitudes of every m inputs, by sorting."""
    groups = weight.detach().abs().reshape(-1, m)
    order = groups.argsort(1, descending=True)
    return torch.zeros_like(groups).scatter_(1, order[:, :n], 1.0).reshape(weight.shape).bool()


def sparse_layers(learner: rnm_td3.Learner, model: nn.Module) -> list[nn.Linear]:
    """Those of ``model``, which has the form of the learner's."""
    return [model.get_submodule(w.module_name) for w in learner.handle.sparse]


def dense_weights(learner: rnm_td3.Learner) -> list[Tensor]:
    return [w.dense for w in learner.handle.sparse]


def nonzeros(weight: Tensor, m: int) -> Tensor:
    return (weight != 0).reshape(-1, m).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "n", "m"), [("2:4", 2, 4), ("1:4", 1, 4)])
def test_masks_gradients_and_targets(monkeypatch, pattern, n, m):
    masks: dict[Any, list[Tensor]] = {}  # by learner, as they should be
    steps: dict[Any, int] = {}
    seen = {"refreshed": 0, "followed": 0, "would not be N:M": 0}
    descend, follow = rnm_td3.Learner.descend, rnm_td3.Learner.follow

    def watched_descend(self, loss):
        layers = sparse_layers(self, self.model)
        mine = masks.setdefault(self, [largest(dense, n, m) for dense in dense_weights(self)])
        for layer, dense, mask in zip(layers, dense_weights(self), mine, strict=True):
            assert torch.equal(layer.weight, dense * mask)
        descend(self, loss)
        # the gradients of this step are still there
        for layer, mask in zip(layers, mine, strict=True):
            gradient = layer.weight.grad
            assert torch.all(gradient[~mask] == 0)
            assert torch.any(gradient[mask] != 0)
        steps[self] = steps.get(self, 0) + 1
        if steps[self] % INTERVAL == 0:
            new = [largest(dense, n, m) for dense in dense_weights(self)]
            seen["refreshed"] += any(not torch.equal(a, b) for a, b in zip(new, mine, strict=True))
            masks[self] = new

    def watched_follow(self):
        before = copy.deepcopy(dict(self.average.named_parameters()))
        served = [layer.weight.detach().clone() for layer in sparse_layers(self, self.target)]
        follow(self)
        now = dict(self.model.named_parameters()) | {w.name: w.dense for w in self.handle.sparse}
        sparse = {w.name for w in self.handle.sparse}
        for name, averaged in self.average.named_parameters():
            torch.testing.assert_close(averaged, 0.995 * before[name] + 0.005 * now[name])
            assert name in sparse or torch.equal(self.target.get_parameter(name), averaged)
        layers = [sparse_layers(self, model) for model in (self.target, self.average, self.model)]
        for target, average, model, old, mask in zip(*layers, served, masks[self], strict=True):
            assert torch.all(nonzeros(target.weight, m) == n)
            assert torch.equal(target.weight, average.weight * mask)
            seen["would not be N:M"] += bool(
                (nonzeros(0.995 * old + 0.005 * model.weight, m) > n).any()
            )
        seen["followed"] += 1

    monkeypatch.setattr(rnm_td3.Learner, "descend", watched_descend)
    monkeypatch.setattr(rnm_td3.Learner, "follow", watched_follow)
    _, learners = rnm_td3.train(pattern, STEPS, seed=0, interval=INTERVAL)
    actor = learners[0]
    assert [steps[learner] for learner in learners] == [60, 120, 120]
    assert seen["refreshed"] >= 10
    assert seen["followed"] == 3 * 60
    # averaging what they compute with, without projecting it anew
    assert seen["would not be N:M"] > 0

    for learner in learners:
        for model in (learner.model, learner.target):
            pruned = [
                bool((layer.weight == 0).any()) for layer in model if isinstance(layer, nn.Linear)
            ]
            # three inputs of the actor, four of a critic; the last stays dense
            assert pruned == [learner is not actor, True, False]
        learner.handle.finalize()
        for layer in learner.model[2 if learner is actor else 0 : 3 : 2]:
            assert isinstance(layer._parameters["weight"], nn.Parameter)
            assert torch.all(nonzeros(layer.weight, m) == n)


def test_pruned_weights_stay_where_they_are_between_refreshes():
    """Those that no step has ever moved: without a gradient Adam has nothing to move them by."""
    learner = rnm_td3.Learner(rnm_td3.network(4, 1), "2:4", 1000, 100)
    first = [dense.clone() for dense in dense_weights(learner)]
    for _ in range(5):
        learner.descend(learner.model(torch.randn(16, 4)).square().mean())
    for dense, before in zip(dense_weights(learner), first, strict=True):
        moved = dense != before
        assert not moved[~largest(before, 2, 4)].any()
        assert moved[largest(before, 2, 4)].float().mean() > 0.5


@pytest.mark.slow
def test_what_is_printed_and_that_a_seed_decides_it(monkeypatch, capsys):
    monkeypatch.setattr(rnm_td3, "WARM_UP", 220)

    def printed(seed):
        monkeypatch.setattr(
            sys, "argv", ["rnm_td3", "--pattern", "1:4", "--steps", "250", "--seed", str(seed)]
        )
        rnm_td3.main()
        return capsys.readouterr().out

    first = printed(0)
    # 200 steps an episode
    assert first.startswith("1:4: mean return of the last 1 of 1 episodes -")
    assert printed(0) == first != printed(1)


class OneState:
    """A task with one state and a reward of 1 for everything."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, ends: bool) -> None:
        self.ends = ends

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 1.0, self.ends, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_value_stops_where_an_episode_terminates(monkeypatch, ends):
    """Then it is the reward, 1; else every update of the target adds another one."""
    monkeypatch.setattr(rnm_td3, "environment", lambda task: (OneState(ends), 1.0))
    monkeypatch.setattr(rnm_td3, "TAU", 1.0)
    _, (_, critic, _) = rnm_td3.train(None, 240, seed=0, interval=INTERVAL)
    assert critic.handle is None
    assert all((weight != 0).all() for weight in critic.model.parameters() if weight.ndim == 2)
    values = critic.model(torch.cat([torch.zeros(9, 4), torch.linspace(-1, 1, 9)[:, None]], 1))
    assert bool((values > 3).all()) != ends
    if ends:
        torch.testing.assert_close(values, torch.ones(9, 1), atol=0.1, rtol=0)


def test_runs_become_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rnm_td3, "EVALUATED", 1)
    file = tmp_path / "runs.csv"
    for pattern, seed in (("dense", 0), ("dense", 1), ("2:4", 0)):
        words = ["--pattern", pattern, "--seed", str(seed), "--steps", "45", "--out", str(file)]
        monkeypatch.setattr(sys, "argv", ["rnm_td3", *words])
        rnm_td3.main()
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    runs = collect([file])
    assert [round(value) for value in runs["test/return"]] == printed
    assert runs["recipe"].tolist() == ["dense", "dense", "ste_periodic"]
    report.table([str(file)])
    output = capsys.readouterr().out
    assert "ste_periodic" in output
    assert "2:4" in output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--task", "Nothing-v0"], "--task Nothing-v0: .*Nothing"),
        (["--task", "CartPole-v1"], "--task CartPole-v1: .*vectors of numbers"),
        (["--pattern", "5:4"], "5:4"),
        (["--pattern", "3:3"], "3:3"),
    ],
)
def test_what_there_is_not_costs_one_line(words, says, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rnm_td3", "--steps", "10", *words])
    with one_line(SystemExit, says):
        rnm_td3.main()


def test_a_task_of_the_paper(tmp_path, monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)  # where MuJoCo may write what it warns of
    _, learners = rnm_td3.train("2:4", 60, seed=0, interval=INTERVAL, task="HalfCheetah-v5")
    assert [layer.in_features for layer in sparse_layers(learners[0], learners[0].model)] == [256]
    for learner in learners:
        rnm_td3.nmrun.sparsity.check_nm(learner.target, "2:4", exclude="4")
