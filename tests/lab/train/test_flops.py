"""FLOPs of layers against counts by hand, of runs against their plans, and runs that end with their
budget.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from runs import config, finished
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor, nn

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.tasks.base import Batch
from nmrun.lab.train import build, console, flops
from nmrun.lab.train.flops import Products, densities, hardware_density, weight_density
from nmrun.patterns import Pattern
from nmrun.recipes import RECIPES
from nmrun.step.activations import SquaredReLU


class Sums:
    """The sum of the outputs, for three items of any shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def example(self) -> Batch:
        return (torch.zeros(3, *self.shape),)

    def size(self, batch: Batch) -> int:
        return len(batch[0])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return model(batch[0]).sum()


def counted(
    model: nn.Module,
    shape: tuple[int, ...],
    recipe: str = "ste",
    pattern: str = "2:4",
    **options: Any,
) -> Any:
    handle = nmrun.sparsify(
        model, nmrun.optim.Adam(model.parameters()), recipe, pattern, **{"exclude": None, **options}
    )
    return flops.count(model, Sums(*shape), handle.sparse), handle.recipe


# --- by hand --------------------------------------------------------------------------------------


@pytest.fixture(params=[flops.COMPUTED, 0], ids=["computed", "on meta"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to count."""
    monkeypatch.setattr(flops, "COMPUTED", request.param)


@pytest.mark.usefixtures("place")
def test_a_linear_layer():
    """The first layer gives its input no gradient; the second does."""
    first, second = 2 * 16 * 8, 2 * 4 * 16
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.Linear(16, 4))
    middle = 2 * 8 * 16
    cost, recipe = counted(model, (16,), exclude=["0"])
    assert cost.forward == first + middle + second
    assert cost.backward == first + 2 * middle + 2 * second
    assert cost.inference() == cost.inference(hardware=True) == first + (middle + second) / 2
    dense = first * 2 + middle * 3 + second * 3
    assert cost.dense == dense
    assert cost.training(recipe) == dense - (middle + second) / 2 * 2  # forward and input gradient
    assert cost.training(recipe, hardware=True) == dense - (middle + second) / 2  # forward


@pytest.mark.usefixtures("place")
def test_a_convolution():
    """Stride 2 and padding: 9 positions of 6 x 6; then two groups, which have half the inputs each."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=2)
    )
    first, second = 2 * 4 * 8 * 9 * 9, 2 * 4 * 16 * 9 * 1
    cost, recipe = counted(model, (4, 6, 6), "ste_periodic", "1:4", gradient="masked")
    assert cost.forward == first + second
    assert cost.backward == first + 2 * second
    assert cost.training(recipe) == (2 * first + 3 * second) / 4
    assert cost.training(recipe, hardware=True) == first / 2 + first + second / 2 + 2 * second
    assert (cost.inference(), cost.inference(hardware=True)) == (
        (first + second) / 4,
        (first + second) / 2,
    )


class Attention(nn.Module):
    """Self-attention in two heads: (items, 8, 16) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).reshape(x.shape)


@pytest.mark.usefixtures("place")
def test_attention():
    """Scores and their mixture of values, in two heads of 8 x 8 positions and 8 channels."""
    layer, scores, mixture = 2 * 16 * 48 * 8, 2 * 2 * 8 * 8 * 8, 2 * 2 * 8 * 8 * 8
    cost, _ = counted(Attention(), (8, 16))
    assert cost.forward == layer + scores + mixture
    assert cost.backward == layer + 2 * (scores + mixture)
    assert cost.inference() == layer / 2 + scores + mixture


class Recurrent(nn.Module):
    """(items, 5, 8) to the last output (items, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


class Looking(Recurrent):
    """It needs a value, which there is none of on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.isfinite().all().item() else x[:, -1]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("network", [Recurrent, Looking])
def test_an_lstm(network):
    """Four gates of the input and of the state at five steps; the first state, which is zero, gets
    no gradient, and the input none."""
    product = 2 * 8 * (4 * 8)
    cost, recipe = counted(network(), (5, 8))
    assert cost.forward == 2 * 5 * product
    assert cost.backward == (5 + 5 + 4) * product
    assert cost.inference() == cost.forward / 2
    assert cost.dense - cost.training(recipe) == (10 + 4) * product / 2


def test_layers_with_patterns_of_their_own():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    cost, recipe = counted(model, (16,), "sr_ste", "2:4", overrides={"1": "4:16"})
    one = 2 * 16 * 16
    assert cost.training(recipe) == one * (1 / 2 + 1) + one * (1 / 4 + 1 / 4 + 1)
    assert cost.training(recipe, hardware=True) == one * (1 / 2 + 1) + one * (14 / 16 + 2)


@pytest.mark.parametrize(
    "pattern",
    [
        "1:1",
        "1:2",
        "1:3",
        "1:4",
        "1:5",
        "1:8",
        "2:3",
        "2:4",
        "3:4",
        "2:5",
        "2:6",
        "2:8",
        "3:8",
        "4:8",
        "2:12",
        "6:8",
    ],
)
def test_tensor_cores_run_what_is_always_two_of_four(pattern):
    """Every mask of the pattern, over as many groups as fill a multiple of four."""
    p = Pattern.parse(pattern)
    length = math.lcm(p.m, 4)
    runs = all(
        len({i * p.m + k for i, group in enumerate(mask) for k in group} & set(range(a, a + 4)))
        <= 2
        for mask in itertools.product(itertools.combinations(range(p.m), p.n), repeat=length // p.m)
        for a in range(0, length, 4)
    )
    assert hardware_density(p) == (0.5 if runs else 1.0)


@pytest.mark.parametrize(
    "pattern", ["2:4", "4:6", "6:8", "4:8", "8:10", "9:10", "7:8", "5:6", "3:4", "4:5"]
)
def test_overlapping_windows_take_every_mask(pattern):
    """Two kept weights for each window of four, by a maximum matching for every mask of the pattern."""
    p = Pattern.parse(pattern)
    windows = [range(a, a + 4) for a in range(0, p.m - 3, 2)]
    slots = [window for window in windows for _ in range(2)]
    fits = p.m % 2 == 0 and all(
        (
            maximum_bipartite_matching(
                csr_matrix([[place in slot for slot in slots] for place in mask]), "column"
            )
            >= 0
        ).all()
        for mask in itertools.combinations(range(p.m), p.n)
    )
    assert weight_density(p) == (len(windows) * 4 / 2 / p.m if fits else 1.0)


@pytest.mark.parametrize(
    ("pattern", "length", "share"),
    [
        ("6:8", 16, 3 / 4),
        ("6:8", 19, (6 + 6 + 4) / 19),  # what is left is computed as dense, filled up to four
        ("2:8", 16, 1 / 2),  # 2:4 as it lies
        ("8:16", 32, 14 / 16),
        ("64:2:8", 16, 1 / 4),  # four of eight columns, and half of these
        ("32:4:16", 32, 1 / 4),
    ],
)
def test_a_weight_costs_the_least_of_all_ways(pattern, length, share):
    assert weight_density(Pattern.parse(pattern).over(length)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("pattern", "length", "columns", "halved"),
    [
        ("64:2:8", 16, 8, True),
        ("16:1:5", 10, 8, True),
        ("32:3:8", 16, 8, False),  # of the four columns three are left
        ("32:4:16", 16, 4, False),
        ("64:2:8", 20, 12, True),  # a short last group has four columns
        ("64:2:8", 9, 8, True),  # or is filled up to four
        ("64:3:5", 6, 6, False),  # more than all columns: dense
        ("8:2:8", 16, 16, True),  # blocks smaller than a tile: 2:8 alone
        ("8:2:6", 12, 12, False),
    ],
)
def test_tensor_cores_compute_the_shared_columns(pattern, length, columns, halved):
    p = Pattern.parse(pattern).over(length)
    assert hardware_density(p) == pytest.approx(columns / length * (0.5 if halved else 1))


def test_the_second_pruning_of_blocks_is_by_rows():
    """Double pruning halves the input gradient alone, as 2:8 along the outputs."""
    cost, recipe = counted(
        nn.Linear(16, 32), (16,), pattern="16:2:8", input_gradient="double_prune"
    )
    (part,) = cost.sparse
    assert densities(recipe, part.weight, hardware=True) == (0.25, 0.5, 1.0)
    assert densities(recipe, part.weight) == (0.25, 0.25, 1.0)


# --- activations ----------------------------------------------------------------------------------

ONE, AROUND = 2 * 5 * 16 * 64, 2 * 5 * 16 * 16  # FLOPs of a product within the block, and beside it


def feed_forward(pattern: str, recipe: str = "dense", ratio: str = "2:4", **shares: Any) -> Any:
    """Five tokens an item through a layer 16 to 64 to 16, between two others that stay dense."""
    torch.manual_seed(0)
    inner = (nn.Linear(16, 64), SquaredReLU(), nn.Dropout(0.0), nn.Linear(64, 16))
    model = nn.Sequential(nn.Linear(16, 16), *inner, nn.Linear(16, 16))
    optimizer = nmrun.optim.Adam(model.parameters())
    handle = nmrun.sparsify(model, optimizer, recipe, ratio, 20, exclude=["0", "5"])
    pruned = nmrun.sparse_activations(model, pattern, **shares)
    cost = flops.count(model, Sums(5, 16), handle.sparse, activations=pruned)
    return model, handle.recipe, cost


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("pattern", "share", "hardware"),
    [("2:4", 1 / 2, 1 / 2), ("4:8", 1 / 2, 1), ("1:8", 1 / 8, 1 / 2), ("64:2:16", 1 / 8, 1 / 8)],
)
def test_pruned_activations(pattern, share, hardware):
    """All of the block's six products but X V^T; on tensor cores Y = Z W^T and dX = dB V. Of
    64:2:16 these compute four of sixteen columns, halved."""
    _, recipe, cost = feed_forward(pattern)
    assert cost.dense == 6 * ONE + 5 * AROUND  # the model's input has no gradient
    assert cost.training(recipe) == 5 * AROUND + (1 + 5 * share) * ONE
    assert cost.training(recipe, hardware=True) == 5 * AROUND + (4 + 2 * hardware) * ONE
    assert cost.inference() == 2 * AROUND + (1 + share) * ONE
    assert cost.inference(hardware=True) == 2 * AROUND + (1 + hardware) * ONE


def test_the_multiplications_that_are_left_one_by_one():
    """Where no activation is 0 by itself, from the very operands of a pass: pairs of two numbers of
    which neither is 0, in each result that the mask does not make 0."""
    model, recipe, cost = feed_forward("2:8")
    nn.init.constant_(model[1].bias, 9.0)
    seen: dict[str, Tensor] = {}
    model[1].register_full_backward_hook(lambda _, dx, db: seen.update(db=db[0]))
    model[4].register_forward_pre_hook(lambda _, z: seen.update(z=z[0]))
    model[4].register_full_backward_hook(lambda _, dz, dy: seen.update(dy=dy[0]))
    model(torch.randn(5, 16, requires_grad=True)).square().sum().backward()
    (z, dy, db), v, w = (seen[k] for k in ("z", "dy", "db")), model[1].weight, model[4].weight

    def pairs(a, b, mask=1.0):
        return float((((a != 0).float() @ (b != 0).float()) * mask).sum())

    x = torch.ones(5, 16)
    left = [pairs(x, v.t()), pairs(z, w.t()), pairs(dy, w, (z != 0).float()), pairs(dy.t(), z)]
    left += [pairs(db.t(), x), pairs(db, v)]
    assert cost.training(recipe) == 5 * AROUND + 2 * sum(left)


@pytest.mark.usefixtures("place")
def test_pruned_activations_beside_sparse_weights():
    """STE at 1:4 within the block: arithmetically the zeros of both are left out."""
    _, recipe, cost = feed_forward("2:4", "ste", "1:4")
    forward, backward = 1 / 4 + 1 / 8, (1 / 8 + 1 / 2) + (1 / 8 + 1 / 2)
    assert cost.training(recipe) == 5 * AROUND + (forward + backward) * ONE
    assert cost.inference() == 2 * AROUND + forward * ONE
    # of a product's two sparse operands one counts: X V^T by V, Y by either, dX by dB
    assert cost.training(recipe, hardware=True) == 5 * AROUND + (3 / 2 + 3) * ONE
    assert cost.inference(hardware=True) == 2 * AROUND + ONE


def test_dense_shares_of_pruned_activations_cost_what_dense_steps_do():
    _, recipe, cost = feed_forward("2:4", total_steps=10, dense_start=0.1, dense_end=0.4)
    pruned = 5 * AROUND + 3.5 * ONE
    by_hand = [cost.dense, *[pruned] * 5, *[cost.dense] * 4]
    assert [cost.training(recipe, step) for step in range(10)] == by_hand
    assert cost.planned(recipe, 10) == pytest.approx(sum(by_hand) / 10)
    assert cost.inference() == cost.inference(hardware=True) == cost.forward
    for step, expected in enumerate(by_hand):
        cost.activations.at(step)
        assert cost.training(recipe) == expected
    *_, early = feed_forward("2:4", total_steps=10, dense_start=0.9)
    assert early.inference() == 2 * AROUND + 1.5 * ONE


def test_a_layer_between_two_activations_feeds_and_reads():
    model = nn.Sequential(
        nn.Linear(16, 16), SquaredReLU(), nn.Linear(16, 16), SquaredReLU(), nn.Linear(16, 16)
    )
    pruned = nmrun.sparse_activations(model, "1:4")
    cost = flops.count(model, Sums(16), activations=pruned)
    recipe = nmrun.sparsify(
        model, torch.optim.SGD(model.parameters(), 0.1), "dense", exclude=None
    ).recipe
    one = 2 * 16 * 16
    # dV alone; then Y, dX masked, dW, of the middle by both; then Y, dA, dW
    assert cost.training(recipe) == one * ((1 + 1 / 4) + (1 / 4 + 2 / 16) + 3 / 4)


# --- schedules ------------------------------------------------------------------------------------

PATTERN = Pattern(2, 8)
DENSE, STE, MASKED = Products(), Products(0.25, 0.25, 1.0), Products(0.25, 0.25, 0.25)
SCHEDULES: dict[
    str, tuple[dict[str, Any], list[tuple[int, Products]]]
] = {  # steps of 20 in each phase
    "dense": ({}, [(20, DENSE)]),
    "ste": ({}, [(20, STE)]),
    "ste_periodic": ({}, [(20, MASKED)]),
    "sr_ste": ({}, [(20, STE)]),
    "s_ste": ({}, [(20, STE)]),
    "bi_mask": ({}, [(20, STE)]),
    "asp": ({"prune_at": 0.25}, [(5, DENSE), (15, MASKED)]),
    "step": ({"switch": 0.3}, [(6, DENSE), (14, STE)]),
    "t_sr_ste": ({"dense_end": 0.2}, [(16, STE), (4, DENSE)]),
    "mdgf_linear": ({"dense": 0.1, "final": 0.3}, [(14, DENSE), (6, MASKED)]),
    "mdgf_exponential": (
        {"dense": 0.1, "final": 0.3, "grad_mode": "ste"},
        [(14, DENSE), (6, STE)],
    ),
    "sdgf_geometric": ({"dense": 0.1, "final": 0.3, "frames": 2}, [(2, DENSE), (18, STE)]),
    "sdgf_stepwise": (  # 7:8, 4:8, 2:8
        {"dense": 0.1, "final": 0.3},
        [(2, DENSE), (4, Products(7 / 8, 7 / 8)), (4, Products(0.5, 0.5)), (10, STE)],
    ),
    "lbc": ({"t_f": 0.5}, [(10, DENSE), (10, MASKED)]),
    "maskllm": ({}, [(20, DENSE)]),
    "slope": ({}, [(20, MASKED)]),
    "ast": ({}, [(20, STE)]),
    "cast": ({}, [(20, DENSE)]),
    "proxsparse": ({}, [(20, DENSE)]),
    "sqft": ({}, [(20, MASKED)]),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_planned_and_used(recipe):
    """The densities of each step, asked for beforehand and met on the way, and their sum over the
    run.
    """
    hyperparameters, phases = SCHEDULES[recipe]
    expected = [shares for steps, shares in phases for _ in range(steps)]
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = nmrun.optim.Adam(model.parameters())
    handle = nmrun.sparsify(
        model, optimizer, recipe, PATTERN, 20, **{"exclude": None, **hyperparameters}
    )
    rule, cost = handle.recipe, flops.count(model, Sums(16), handle.sparse)
    for weight in handle.sparse:
        assert [densities(rule, weight, step) for step in range(20)] == expected
    planned = cost.planned(rule, 20), cost.planned(rule, 20, hardware=True)
    used = []
    for step in range(20):
        for weight in handle.sparse:
            assert densities(rule, weight) == expected[step], step
        used.append((cost.training(rule), cost.training(rule, hardware=True)))
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    one = 2 * 16 * 16  # the first layer has no input gradient
    by_hand = [one * (2 * d.forward + d.input_gradient + 2 * d.weight_gradient) for d in expected]
    assert [arithmetic for arithmetic, _ in used] == by_hand
    assert planned[0] == pytest.approx(sum(by_hand) / 20)
    assert planned[1] == pytest.approx(sum(hardware for _, hardware in used) / 20)


def test_both_products_on_hardware_where_both_operands_are_sparse():
    for recipe, expected in (
        ("sr_ste", (0.5, 1, 1)),
        ("t_sr_ste", (0.5, 0.5, 1)),
        ("bi_mask", (0.5, 0.5, 1)),
    ):
        cost, rule = counted(nn.Sequential(nn.Linear(16, 16)), (16,), recipe)
        assert densities(rule, cost.sparse[0].weight, hardware=True) == expected


def test_a_switch_found_on_the_way_is_planned_at_the_latest_and_counted_where_it_was():
    model = nn.Sequential(nn.Linear(16, 16))
    # settled from the first full window on
    optimizer = nmrun.optim.Adam(model.parameters(), betas=(0.9, 0.5), eps=1e3)
    handle = nmrun.sparsify(model, optimizer, "step", "2:4", 20, t_min=0.2, t_max=0.5, exclude=None)
    rule, weight = handle.recipe, handle.sparse[0]
    assert [densities(rule, weight, step) == DENSE for step in range(20)] == [True] * 11 + [
        False
    ] * 9
    met = []
    for _ in range(20):
        met.append(densities(rule, weight) == DENSE)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    assert met == [True] * 5 + [False] * 15


# --- runs -----------------------------------------------------------------------------------------

BATCH = 32
WEIGHTS = 8 * 8 * 9  # of each sparse layer of the tiny network


def used(*arguments: Any) -> dict[str, int]:
    """The FLOPs of a run."""
    flops: dict[str, int] = finished(config(*arguments))["flops"]
    return flops


def test_result_of_a_run_by_hand(tmp_path):
    """Stem 1 -> 8 at 8 x 8, two sparse layers 8 -> 8 at 8 x 8 and at 4 x 4, a head; ASP prunes
    after 3 of 12 steps.
    """
    stem = 2 * 9 * 8 * 64
    inner = 2 * WEIGHTS * 64 + 2 * WEIGHTS * 16
    head = 2 * 10 * 8 * 4
    dense = 2 * stem + 3 * inner + 3 * head
    counts = used(tmp_path, "recipe=asp", "recipe.prune_at=0.25")
    assert counts == {
        "training_arithmetic": BATCH * (3 * dense + 9 * (dense - 3 * inner // 2)),
        "training_hardware": BATCH * (3 * dense + 9 * (dense - inner // 2)),
        "training_dense": BATCH * 12 * dense,
        "inference_arithmetic": stem + inner // 2 + head,
        "inference_hardware": stem + inner // 2 + head,
    }


@pytest.mark.parametrize("end", [0.0, 0.4])
def test_a_network_that_ends_dense_costs_what_a_dense_one_does(end, tmp_path):
    """In the plan as in the result."""
    stem, inner, head = 2 * 9 * 8 * 64, 2 * WEIGHTS * (64 + 16), 2 * 10 * 8 * 4
    cfg = config(tmp_path, "recipe=t_sr_ste", f"recipe.dense_end={end}")
    plan = "\n".join(console.plan_lines(cfg, parts := build.build(cfg)))
    result = finished(cfg)
    every, left = stem + inner + head, stem + (inner if end else inner // 2) + head
    counts = {result["flops"][f"inference_{kind}"] for kind in ("arithmetic", "hardware")}
    assert counts == {left}
    shown, sparse = (f"{flops / 1000:.3g}k" for flops in (every, left))
    assert f"an inference: {shown} dense, {sparse} sparse, {sparse} on 2:4" in plan
    total = sum(parameter.numel() for parameter in parts.model.parameters())
    density = 1 if end else 1 - WEIGHTS / total
    assert f"density {density:.1%} of {total:,} parameters" in plan


def test_result_of_a_run_with_pruned_activations(tmp_path):
    """Six of twelve steps, and dense again: five of six products in two blocks 16 to 64 to 16, of 16
    tokens an item."""
    options = ("dataset=stdlib_text", "dataset.context=16", "model=gpt_tiny", "model.width=16")
    options += ("model.heads=2", "model.activation=relu2", "recipe=dense", "optimizer=adamw")
    options += ("trainer.limit_evaluation=8", "trainer.activations_dense_start=0.25")
    options += ("trainer.activations_dense_end=0.25",)
    usual = used(tmp_path, *options)
    counts = used(tmp_path, *options, "trainer.activations=1:4")
    one = 2 * 2 * 16 * 16 * 64
    left_out = BATCH * 6 * 5 * one * 3 // 4
    assert counts["training_arithmetic"] == usual["training_arithmetic"] - left_out
    assert counts["training_hardware"] == usual["training_hardware"] - BATCH * 6 * one
    assert counts["training_dense"] == usual["training_dense"] == usual["training_arithmetic"]
    assert counts["inference_arithmetic"] == usual["inference_arithmetic"]
    # the first block's gradients go on to the embeddings; half the steps alone are cheaper
    planned = build.build(
        config(tmp_path, *options, "trainer.activations=1:4", "trainer.budget=flops:dense")
    ).total_steps
    assert planned == round(12 * usual["training_dense"] / counts["training_arithmetic"])


# --- budgets --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The FLOPs of six dense epochs."""
    place = tmp_path_factory.mktemp("dense")
    return used(place, "recipe=dense", "trainer.epochs=6")["training_dense"]


@pytest.mark.parametrize("recipe", ["dense", "ste", "asp", "lbc"])
def test_as_many_flops_as_dense_training(recipe, dense, tmp_path):
    """Sparse steps are cheaper, so there are more of them, and the sums are equal to less than an
    epoch.
    """
    counts = used(tmp_path, f"recipe={recipe}", "trainer.budget=flops:dense", "trainer.epochs=6")
    assert abs(counts["training_arithmetic"] - dense) < dense / 6
    steps = round(counts["training_dense"] / (dense / 18))
    assert steps == 18 if recipe == "dense" else steps > 18
    if recipe == "ste":
        assert abs(counts["training_arithmetic"] - dense) < dense / 18  # less than a step


def test_as_many_flops_of_tensor_cores_as_dense_training(dense, tmp_path):
    """The forward product alone is cheaper there, and by half at most. Multiplications count less."""
    words = ("recipe=ste", "trainer.budget=hardware_flops:dense", "trainer.epochs=6")
    counts = used(tmp_path, *words)
    assert abs(counts["training_hardware"] - dense) < dense / 18  # less than a step
    steps = round(counts["training_dense"] / (dense / 18))
    assert 18 < steps < 18 * 3 / 2.5
    again = used(tmp_path / "number", "recipe=ste", f"trainer.budget=hardware_flops:{float(dense)}")
    assert again["training_hardware"] == counts["training_hardware"]


def test_a_number_of_flops(tmp_path):
    step = used(tmp_path, "recipe=ste", "trainer.epochs=1")["training_arithmetic"] / 3
    long, short = (
        used(tmp_path, "recipe=ste", f"trainer.budget=flops:{n * step}") for n in (20, 3.2)
    )
    assert long["training_arithmetic"] == 20 * step
    assert short["training_arithmetic"] == 3 * step
    with pytest.raises(
        ConfigError,
        match=r"trainer.budget=flops:.* is 0.67 epochs",
    ):
        build.build(config(tmp_path, "recipe=ste", f"trainer.budget=flops:{2 * step}"))
    six = ("recipe=ste", f"trainer.budget=flops:{6 * step}")  # two epochs
    assert build.build(config(tmp_path, *six, "trainer.average=2")).total_steps == 6
    with pytest.raises(ConfigError, match=r"trainer.average=3"):
        build.build(config(tmp_path, *six, "trainer.average=3"))


def test_the_trial_for_a_budget_leaves_no_trace(tmp_path):
    """MaskLLM draws its logits at random, and the training draws on."""
    # dense products throughout: the same number of steps
    options = ["recipe=maskllm", "trainer.epochs=4"]
    states = []
    for budget in ("null", "flops:dense"):
        parts = build.build(config(tmp_path, *options, f"trainer.budget={budget}"))
        assert parts.total_steps == 12
        states.append([*parts.model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *states))
