"""Layer-wise ratios under a budget: against all possible assignments, and the verb whose printed
command has to train.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import shlex
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from errors import one_line
from runs import config, result_of
from torch import nn
from verbs import verb

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.train import build
from nmrun.papers.ratios import search
from nmrun.papers.ratios.propose import main
from nmrun.papers.ratios.search import (
    best_choice,
    flops_by_layer,
    search_ratios,
)
from nmrun.sparsity.weight import LIVE

M = 16
CHOICES = (16, 8, 4, 2, 1)
WIDTHS = [(16, 48, 32, 16, 10), (64, 16, 64, 48, 10), (32, 32, 32, 32, 10)]


def network(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    """Linear layers whose weights are more and less concentrated in a few large ones."""
    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    for layer in net:
        nn.init.normal_(layer.weight)
        layer.weight.data *= torch.rand_like(layer.weight) ** float(3 * torch.rand(()))
    return net


def kept_shares(layer: nn.Linear) -> dict[int, float]:
    """For each N the share of squared weights in the N largest of every 16, group by group."""
    squares = [
        sorted((w**2 for w in group), reverse=True)
        for group in layer.weight.detach().reshape(-1, M).tolist()
    ]
    total = sum(map(sum, squares))
    return {n: sum(sum(group[:n]) for group in squares) / total for n in CHOICES}


def assignments(
    net: nn.Sequential, costs: list[float]
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Every choice of N for every layer, its cost as a share of dense and the sum of kept shares."""
    shares = [kept_shares(layer) for layer in net]
    for ns in itertools.product(CHOICES, repeat=len(net)):
        cost = sum(cost * n / M for cost, n in zip(costs, ns, strict=True)) / sum(costs)
        yield ns, cost, sum(share[n] for share, n in zip(shares, ns, strict=True))


CASES = [(w, seed, kind) for w in WIDTHS for seed in range(2) for kind in ("weights", "own")]


@pytest.mark.parametrize(("widths", "seed", "kind"), CASES)
def test_no_choice_within_the_budget_keeps_more(widths, seed, kind):
    """At budgets in even steps, and at those that some choice uses up."""
    net = network(widths, seed)
    costs = [
        layer.weight.numel() if kind == "weights" else 1.0 + 3 * i for i, layer in enumerate(net)
    ]
    every = {ns: (cost, share) for ns, cost, share in assignments(net, costs)}
    exact = sorted(cost for cost, _ in every.values() if cost < 1)[:: len(every) // 20]
    layer_costs = None if kind == "weights" else {str(i): cost for i, cost in enumerate(costs)}
    for budget in [*torch.linspace(1 / M, 0.99, 20, dtype=torch.float64).tolist(), *exact]:
        proposal = search_ratios(net, budget, costs=layer_costs)
        cost, share = every[tuple(proposal.ratios[str(i)].n for i in range(len(net)))]
        assert cost <= budget + 1e-8
        assert share == pytest.approx(max(k for c, k in every.values() if c <= budget), abs=1e-6)
        assert proposal.used == pytest.approx(cost, abs=1e-12)
        assert {ratio.m for ratio in proposal.ratios.values()} == {M}
        assert sum(proposal.shares.values()) == pytest.approx(share, abs=1e-6)


def test_a_list_that_grows_too_long_is_thinned_by_little(monkeypatch):
    """Ten layers, 59,049 choices and 300 entries: as good as with ten of 300 parts less to spend."""
    monkeypatch.setattr(search, "LONGEST", 300)
    draw = random.Random(0)
    costs = [[1.0, draw.uniform(0.3, 0.9), draw.uniform(0.1, 0.3)] for _ in range(10)]
    gains = [[1.0, draw.uniform(0.7, 1.0), draw.uniform(0.2, 0.7)] for _ in range(10)]
    cost, gain = (
        functools.reduce(np.add.outer, map(np.array, side)).ravel() for side in (costs, gains)
    )
    for most in (2.5, 4.0, 6.0, 8.5):
        choice = best_choice(costs, gains, most)
        spent = sum(layer[at] for layer, at in zip(costs, choice, strict=True))
        gained = sum(layer[at] for layer, at in zip(gains, choice, strict=True))
        assert spent <= most
        assert gained >= gain[cost <= most * (1 - 10 / 300)].max()


def test_the_density_is_that_of_the_model_that_is_pruned_so():
    net = network((64, 96, 32, 10), 0)
    proposal = search_ratios(net, 0.3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    overrides = {k: "dense" if r.n == r.m else r for k, r in proposal.ratios.items()}
    handle = nmrun.sparsify(net, optimizer, "ste", "1:2", overrides=overrides, exclude=None)
    optimizer.step()  # without gradients, so nothing moves
    handle.finalize()
    zeros = [int((layer.weight == 0).sum()) for layer in net]
    weights = [layer.weight.numel() for layer in net]
    assert 1 - sum(zeros) / sum(weights) == pytest.approx(proposal.density)
    assert proposal.density == proposal.used


def test_a_module_with_several_weights_has_one_ratio_and_the_cost_of_them_all():
    attention = nn.MultiheadAttention(32, 2, kdim=16, vdim=16)
    net = nn.ModuleDict({"attention": attention, "out": nn.Linear(32, 32)})
    with torch.no_grad():
        net["attention"].q_proj_weight[:, ::4] *= 30
    proposal = search_ratios(net, 0.5, m=8)
    cost = {"attention": 32 * 32 + 2 * 32 * 16, "attention.out_proj": 32 * 32, "out": 32 * 32}
    assert set(proposal.ratios) == set(cost)
    assert len(set(proposal.ratios.values())) > 1
    kept = sum(c * proposal.ratios[k].density for k, c in cost.items())
    assert proposal.density == pytest.approx(kept / sum(cost.values()))


def test_what_is_left_out_stays_out_and_what_cannot_be_had_is_said():
    net = network((16, 48, 32, 10), 0)
    assert list(search_ratios(net, 0.25, exclude="1").ratios) == ["0", "2"]
    assert list(search_ratios(net, 0.25, include=["0", "2"], exclude="2").ratios) == ["0"]
    # 16 and 48 inputs hold no group of 32
    assert list(search_ratios(net, 0.25, m=32).ratios) == ["2"]
    for budget in (1.0, 0.01, -1.0):
        with pytest.raises(ConfigError, match=r"with M = 16 it is from 0.0625 to below 1"):
            search_ratios(net, budget)
    with pytest.raises(ConfigError, match="no layer of this model can hold groups of 64"):
        search_ratios(net, 0.5, m=64)


def test_flops_are_those_of_the_products(tmp_path):
    """A 3x3 convolution: two operations for each kept weight and position. Digits have 8x8 pixels, and
    4x4 after the first pooling.
    """
    parts = build.build(config(tmp_path, "recipe=dense", "model.channels=[16,32,32]"))
    costs = flops_by_layer(parts.model, ["inner.0", "inner.1"], parts.task)
    dense = {"inner.0": 2 * 16 * 32 * 9 * 8 * 8, "inner.1": 2 * 32 * 32 * 9 * 4 * 4}
    assert costs == dense
    # nothing was made sparse for it
    assert not any(id(p) in LIVE for p in parts.model.parameters())


# --- the verb -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A dense run that is not what ``nmrun`` does by default."""
    words = [
        *("model=mlp", "model.hidden=[64,32,64,16]", "model.exclude=[head]", "recipe=dense"),
        *("optimizer=adamw", "optimizer.lr=3e-5", "schedule=cosine", "seed=3", "sparsity=2:4"),
        *("trainer.epochs=1", "trainer.limit_batches=2", "track=local"),
    ]
    place = tmp_path_factory.mktemp("runs")
    return nmrun.run([*words, f"output_dir={place}"]).folder


def test_a_pruned_network_has_no_ratios_to_propose(write):
    run = write("sparsegpt", "2:4", 0, 0.5)
    with one_line(ConfigError, f"^{run} was pruned in one shot; name the run that it began with$"):
        main([str(run)])


@pytest.mark.parametrize(
    "options", [("--budget", "0.2"), ("--budget", "0.5", "--m", "8", "--cost", "flops")]
)
@pytest.mark.slow
def test_the_printed_command_trains_with_the_proposed_ratios(
    trained, options, nmrun_cli, tmp_path, capsys
):
    assert main([str(trained), *options]) == 0
    *table, used, command = capsys.readouterr().out.splitlines()
    proposed = {line.split()[0]: line.split()[1] for line in table}
    assert set(proposed) == {"stem", "inner.0", "inner.1", "inner.2"}
    assert float(used.split()[1]) <= float(options[1]) + 5e-4
    program, *words = shlex.split(command)
    assert program == "nmrun"

    assert {"recipe=step", "seed=3"} < set(words)
    process = nmrun_cli(*(word for word in words if "output_dir" not in word))
    assert process.returncode == 0, process.stderr
    (file,) = tmp_path.rglob("result.json")
    result = json.loads(file.read_text())
    before = result_of(trained)["config"]
    for group in ("dataset", "model", "optimizer", "schedule", "trainer"):
        assert result["config"][group] == before[group]
    layers, left = (
        {layer["name"].removesuffix(".weight"): layer[says] for layer in result["sparsity"][key]}
        for key, says in (("layers", "pattern"), ("left_dense", "reason"))
    )
    dense = "8:8" if "--m" in options else "16:16"
    assert layers == {name: ratio for name, ratio in proposed.items() if ratio != dense}
    assert left.pop("head") == "excluded"
    assert left == {n: "dense by overrides" for n, ratio in proposed.items() if ratio == dense}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("/nowhere",), "/nowhere: no finished run is there"),
        (("RUN", "--budget", "1"), "argument --budget: 1: it takes a number above 0 and below 1"),
        (("RUN", "--m", "12"), "argument --m: 12: it takes a power of two, 2 or more"),
    ],
)
def test_a_mistake_gets_a_line(trained, options, message, capsys):
    assert verb("ratios", *(str(trained) if word == "RUN" else word for word in options)) == 2
    assert capsys.readouterr().err == f"nmrun: {message}\n"
