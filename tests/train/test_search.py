"""Layer-wise ratios under a budget: against all possible assignments, and the verb whose printed
command has to train.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator

import pytest
import torch
from runs import config
from torch import nn
from verbs import verb

import nmrun
from nmrun.config.identity import run_folder
from nmrun.errors import ConfigError
from nmrun.sparsity.weight import LIVE
from nmrun.train import runner
from nmrun.train.ratio_search import flops_by_layer, search_ratios
from nmrun.train.ratios import main

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
    net: nn.Sequential, cost: list[float]
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Every choice of N for every layer, its density and the sum of kept shares."""
    shares = [kept_shares(layer) for layer in net]
    for ns in itertools.product(CHOICES, repeat=len(net)):
        density = sum(c * n / M for c, n in zip(cost, ns, strict=True)) / sum(cost)
        yield ns, density, sum(share[n] for share, n in zip(shares, ns, strict=True))


def priced(shares: list[dict[int, float]], cost: list[float]) -> set[tuple[int, ...]]:
    """What the layers choose, each for itself, at many prices of the cost."""
    prices = [price / sum(cost) / M for price in torch.logspace(-2, 2, 60).tolist()]
    return {
        tuple(
            max(CHOICES, key=lambda n: share[n] - price * c * n)
            for share, c in zip(shares, cost, strict=True)
        )
        for price in prices
    }


CASES = [(widths, seed, own) for widths in WIDTHS for seed in range(2) for own in (False, True)]


@pytest.mark.parametrize(("widths", "seed", "own_costs"), CASES)
def test_it_is_the_best_of_all_where_the_greedy_way_must_be(widths, seed, own_costs):
    """A price on cost makes each layer choose for itself. What they choose is the best for what it
    costs in all (Lagrange): there the search has to find it, with nothing of the budget left over.
    """
    net = network(widths, seed)
    cost = [
        1.0 + 3 * i if own_costs else float(layer.weight.numel()) for i, layer in enumerate(net)
    ]
    costs = {str(i): c for i, c in enumerate(cost)} if own_costs else None
    every = list(assignments(net, cost))
    shares = [kept_shares(layer) for layer in net]
    chosen = priced(shares, cost)
    budgets = [one for one in every if one[0] in chosen and one[1] < 1]
    assert len(budgets) >= 5
    for ns, density, kept in budgets:
        assert kept >= max(k for _, d, k in every if d <= density + 1e-12) - 1e-12
        found = search_ratios(net, density, costs=costs)
        assert [found.ratios[str(i)].n for i in range(len(net))] == list(ns)
        assert {ratio.m for ratio in found.ratios.values()} == {M}
        assert found.density == pytest.approx(density, abs=1e-12)
        assert list(found.kept.values()) == pytest.approx(
            [shares[i][n] for i, n in enumerate(ns)], abs=1e-6
        )


@pytest.mark.parametrize(("widths", "seed", "own_costs"), CASES)
def test_the_budget_holds_and_is_used(widths, seed, own_costs):
    """At any density: not above it, no layer could have twice its N, and no cheaper choice of a
    price keeps more.
    """
    net = network(widths, seed)
    cost = [
        1.0 + 3 * i if own_costs else float(layer.weight.numel()) for i, layer in enumerate(net)
    ]
    every = {ns: (density, kept) for ns, density, kept in assignments(net, cost)}
    chosen = {(1,) * len(net), *priced([kept_shares(layer) for layer in net], cost)}
    for density in torch.linspace(1 / M, 0.99, 25).tolist():
        found = search_ratios(
            net, density, costs={str(i): c for i, c in enumerate(cost)} if own_costs else None
        )
        ns = [found.ratios[str(i)].n for i in range(len(net))]
        used, kept = every[tuple(ns)]
        assert found.density == pytest.approx(used)
        assert used <= density * (1 + 1e-6)
        for i, n in enumerate(ns):
            more = tuple(2 * n if j == i else other for j, other in enumerate(ns))
            assert n == M or every[more][0] > density
        assert (
            kept
            >= max(every[choice][1] for choice in chosen if every[choice][0] <= density) - 1e-12
        )


def test_the_density_is_that_of_the_model_that_is_pruned_so():
    net = network((64, 96, 32, 10), 0)
    found = search_ratios(net, 0.3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    handle = nmrun.sparsify(
        net,
        optimizer,
        "ste",
        "1:2",
        overrides={k: "dense" if r.n == r.m else r for k, r in found.ratios.items()},
    )
    optimizer.step()  # without gradients, so nothing moves
    handle.finalize()
    zeros = [int((layer.weight == 0).sum()) for layer in net]
    weights = [layer.weight.numel() for layer in net]
    assert 1 - sum(zeros) / sum(weights) == pytest.approx(found.density)


def test_a_module_with_several_weights_has_one_ratio_and_the_cost_of_them_all():
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(32, 2, kdim=16, vdim=16), "out": nn.Linear(32, 32)}
    )
    with torch.no_grad():
        net["attention"].q_proj_weight[:, ::4] *= 30
    found = search_ratios(net, 0.5, m=8)
    cost = {"attention": 32 * 32 + 2 * 32 * 16, "attention.out_proj": 32 * 32, "out": 32 * 32}
    assert set(found.ratios) == set(cost)
    assert len(set(found.ratios.values())) > 1
    assert found.density == pytest.approx(
        sum(c * found.ratios[k].density for k, c in cost.items()) / sum(cost.values())
    )


def test_what_is_left_out_stays_out_and_what_cannot_be_had_is_said():
    net = network((16, 48, 32, 10), 0)
    assert list(search_ratios(net, 0.25, exclude="1").ratios) == ["0", "2"]
    assert list(search_ratios(net, 0.25, include=["0", "2"], exclude="2").ratios) == ["0"]
    # 16 and 48 inputs hold no group of 32
    assert list(search_ratios(net, 0.25, m=32).ratios) == ["2"]
    for density in (1.0, 0.01, -1.0):
        with pytest.raises(ConfigError, match=r"from 1:16, which is 0.0625, to below 1"):
            search_ratios(net, density)
    with pytest.raises(ValueError, match="power of two"):
        search_ratios(net, 0.5, m=12)
    with pytest.raises(ConfigError, match="no layer of this model can hold groups of 64"):
        search_ratios(net, 0.5, m=64)


def test_flops_are_those_of_the_products(tmp_path):
    """A 3x3 convolution: two operations for each weight and position. Digits have 8x8 pixels, and
    4x4 after the first pooling.
    """
    parts = nmrun.train.build.build(config(tmp_path, "recipe=dense", "model.channels=[16,32,32]"))
    found = flops_by_layer(parts.model, ["inner.0", "inner.1"], parts.task)
    assert found == {"inner.0": 2 * 16 * 32 * 9 * 8 * 8, "inner.1": 2 * 32 * 32 * 9 * 4 * 4}
    # nothing was made sparse for it
    assert not any(id(p) in LIVE for p in parts.model.parameters())


# --- the verb -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A dense run that is not what ``nmrun`` does by default."""
    words = (
        "model=mlp",
        "model.hidden=[64,32,64,16]",
        "model.exclude=[head]",
        "optimizer=adamw",
        "optimizer.lr=3e-5",
    )
    made = config(
        tmp_path_factory.mktemp("runs"), "recipe=dense", *words, "schedule=cosine", "seed=3"
    )
    assert runner.run(made, run_folder(made))["status"] == "finished"
    return run_folder(made)


@pytest.mark.parametrize(
    "options", [("--density", "0.2"), ("--density", "0.5", "--m", "8", "--cost", "flops")]
)
def test_the_printed_command_trains_with_the_proposed_ratios(
    trained, options, nmrun_cli, tmp_path, capsys
):
    assert main([str(trained), *options]) == 0
    *table, density, command = capsys.readouterr().out.splitlines()
    proposed = {line.split()[0]: line.split()[1] for line in table}
    assert set(proposed) == {"stem", "inner.0", "inner.1", "inner.2"}
    assert float(density.split()[1]) <= float(options[1]) + 5e-4
    program, *words = shlex.split(command)
    assert program == "nmrun"

    assert {"recipe=step", "seed=3"} < set(words)
    done = nmrun_cli(*words, "track=local", "output_dir=out")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("result.json")
    result = json.loads(file.read_text())
    dense = json.loads((trained / "result.json").read_text())["config"]
    for group in ("dataset", "model", "optimizer", "schedule", "trainer"):
        assert result["config"][group] == dense[group]
    layers = {
        layer["name"].removesuffix(".weight"): layer["pattern"]
        for layer in result["sparsity"]["layers"]
    }
    left = {
        layer["name"].removesuffix(".weight"): layer["reason"]
        for layer in result["sparsity"]["left_dense"]
    }
    m = dict(zip(options[::2], options[1::2], strict=True)).get("--m", "16")
    assert layers == {name: ratio for name, ratio in proposed.items() if ratio != f"{m}:{m}"}
    assert left.pop("head") == "excluded"
    assert left == {
        name: "dense by overrides" for name, ratio in proposed.items() if ratio == f"{m}:{m}"
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("/nowhere",),
            "/nowhere holds no finished run: there is no config.yaml",
        ),
        (
            ("RUN", "--density", "1"),
            "--density 1 with --m 16: from 0.0625, which is 1:16, to below 1",
        ),
        (("RUN", "--m", "12"), "--m 12: a power of two, 2 or more, since N is halved"),
        (("RUN", "--m", "128"), "no layer of this model can hold groups of 128"),
    ],
)
def test_a_mistake_gets_a_line(trained, options, said, capsys):
    assert verb("ratios", *(str(trained) if word == "RUN" else word for word in options)) == 2
    assert capsys.readouterr().err == f"nmrun: {said}\n"
