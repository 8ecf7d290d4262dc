"""Every recipe's whole trajectory against a reference written by hand, in the training loops people
really write.
"""

import math
from typing import Any

import pytest
import torch
from errors import one_line
from reference import DECAY, LR, TOTAL, Net, Reference, data, soft, train_step
from torch import Tensor
from training import by_sgd

import nmrun
from nmrun.step.handle import Handle

# the recipe, its hyperparameters, the step of its switch
SETTINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": ("dense", {}, 0),
    "ste": ("ste", {}, 0),
    "sr_ste": ("sr_ste", {"decay": DECAY}, 0),
    "s_ste": ("s_ste", {}, 0),
    "asp at once": ("asp", {"prune_at": 0.0}, 0),
    "asp": ("asp", {"prune_at": 0.4}, 4),
    "step": ("step", {"switch": 0.4, "decay": DECAY}, 4),
    "step live": ("step", {"switch": 0.4, "decay": DECAY, "second_moment": "live"}, 4),
}
UPDATES = {
    "sgd": lambda p, wd, **options: torch.optim.SGD(
        p, LR, momentum=0.9, weight_decay=wd, **options
    ),
    "adam": lambda p, wd, **options: nmrun.optim.Adam(p, LR, weight_decay=wd, **options),
    "adamw": lambda p, wd, **options: nmrun.optim.AdamW(p, LR, weight_decay=wd, **options),
}
COMBINATIONS = [
    (s, u) for s in SETTINGS for u in UPDATES if not (s.startswith("step") and u == "sgd")
]


def start(
    setting: str, update: str, wd: float, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Net, Any, Handle]:
    recipe, hyperparameters, _ = SETTINGS[setting]
    model = Net(dtype)
    optimizer = UPDATES[update](model.parameters(), wd, **options)
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, exclude=None, **hyperparameters)
    return model, optimizer, handle


@pytest.mark.parametrize(
    ("accumulate", "clip", "wd"), [(1, None, 0.2), (3, None, 0.0), (3, 0.05, 0.2)]
)
@pytest.mark.parametrize(("setting", "update"), COMBINATIONS)
def test_trajectory(setting, update, accumulate, clip, wd):
    recipe, _, switch = SETTINGS[setting]
    moment = SETTINGS[setting][1].get("second_moment", "frozen")
    reference = Reference(recipe, update, Net().used, wd, switch, moment)
    model, optimizer, handle = start(setting, update, wd)
    batches = data(accumulate)
    for t in range(TOTAL):
        wanted_phase = "dense" if recipe == "dense" or t < switch else "sparse"
        assert (handle.phase, handle.is_sparse) == (wanted_phase, wanted_phase == "sparse")
        train_step(model, optimizer, batches(t), clip)
        reference.step(batches(t), clip)
        torch.testing.assert_close(model.used, reference.forward, rtol=1e-9, atol=1e-12)
    handle.finalize()
    torch.testing.assert_close(model.used, reference.forward, rtol=1e-9, atol=1e-12)


def test_a_weight_without_gradient_is_passed_over():
    for setting, update in COMBINATIONS:
        model, optimizer, handle = start(setting, update, 0.1)
        for _ in range(TOTAL):
            model[0](torch.ones(2, 8, dtype=torch.float64)).sum().backward()
            before = model[2].weight.detach().clone() if handle.is_sparse else None
            optimizer.step()
            assert before is None or torch.equal(model[2].weight, before)


def least_squares(w: Tensor) -> Tensor:
    return (w * soft(w)).sum() / soft(w).square().sum()


def same_sum(w: Tensor) -> Tensor:
    return w.abs().sum() / soft(w).abs().sum()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("options", "scale", "interval"),
    [
        ({}, least_squares, TOTAL),
        ({"fit": "l1"}, same_sum, TOTAL),
        ({"beta": 1.0}, lambda w: torch.ones((), dtype=w.dtype), TOTAL),
        ({"beta": 2.5}, lambda w: torch.full((), 2.5, dtype=w.dtype), TOTAL),
        ({"interval": 1}, least_squares, 1),
        ({"interval": 3}, least_squares, 3),
        ({"interval": 2, "fit": "l1"}, same_sum, 2),
    ],
)
def test_s_ste_scales_of_the_ablations(options, scale, interval, fused):
    """The forward weight is ``scale(w) * S(w)``, the scale of the last multiple of the interval."""
    model = Net(torch.float32)
    optimizer = nmrun.optim.AdamW(model.parameters(), LR, fused=fused)
    handle = nmrun.sparsify(model, optimizer, "s_ste", "2:4", TOTAL, exclude=None, **options)
    dense = [w.dense.clone() for w in handle.sparse]
    expected = [scale(w) for w in dense]
    for t, batch in enumerate(data(TOTAL, torch.float32)(0), 1):
        train_step(model, optimizer, [batch])
        if t % interval == 0 and "beta" not in options and interval < TOTAL:
            expected = [scale(w.dense) for w in handle.sparse]
        for weight, beta in zip(handle.sparse, expected, strict=True):
            torch.testing.assert_close(weight["scale"], beta)
            torch.testing.assert_close(weight.weight, beta * soft(weight.dense))
    logged = handle.recipe.metrics()
    assert set(logged) == ({"s_ste/scale", "s_ste/largest_scale"} if interval < TOTAL else set())
    if logged:
        assert logged["s_ste/scale"] == pytest.approx(float(sum(expected) / 2))
        assert logged["s_ste/largest_scale"] == pytest.approx(float(max(expected)))


def test_s_ste_with_another_threshold():
    model = Net()
    optimizer = nmrun.optim.AdamW(model.parameters(), LR)
    handle = nmrun.sparsify(model, optimizer, "s_ste", "2:4", TOTAL, gamma=0.5, exclude=None)
    for x, y in data(3)(0):
        (model(x) - y).square().mean().backward()
        optimizer.step()
    for weight in handle.sparse:
        groups = weight.dense.reshape(-1, 4)
        size = groups.abs().sort(dim=1, descending=True).values
        threshold = (size[:, 1:2] + size[:, 2:3]) / 2
        by_hand = groups.sign() * (groups.abs() - threshold).clamp_min(0) * weight["scale"]
        torch.testing.assert_close(weight.weight.reshape(-1, 4), by_hand)
    handle.finalize()


def test_s_ste_refuses_two_kinds_of_scales():
    for options in ({"interval": 3}, {"fit": "l1"}):
        model = Net()
        with pytest.raises(ValueError, match="of a fitted scale, and beta is a fixed one"):
            by_sgd(model, "s_ste", "2:4", lr=LR, beta=1.0, **options)


@pytest.mark.parametrize("recipe", sorted(set(nmrun.recipes.RECIPES) - {"custom"}))
def test_dropout_draws_the_same_with_every_recipe(recipe):
    """Runs of one seed are compared in pairs, so what they draw is the same."""
    frames = {"frames": 2} if recipe == "sdgf_geometric" else {}
    model = Net(torch.float32)
    torch.manual_seed(5)
    optimizer = nmrun.optim.AdamW(model.parameters(), LR)
    nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, exclude=None, **frames)
    for x, y in data(TOTAL)(0):
        (model(x.float()) - y.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    drawn = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(4))


@pytest.mark.parametrize("recipe", ["dense", "nmrun.recipes.dense.Dense"])
def test_dense_leaves_everything_alone(recipe):
    model, plain = Net(), Net()
    optimizer, plain_optimizer = (nmrun.optim.AdamW(m.parameters(), LR) for m in (model, plain))
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", exclude=None)
    for batch in data(TOTAL)(0):
        train_step(model, optimizer, [batch])
        train_step(plain, plain_optimizer, [batch])
    assert all(map(torch.equal, model.used, plain.used))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert (handle.sparse, handle.phase) == ([], "dense")
    assert (handle.is_sparse, handle.metrics()) == (False, {})
    report = handle.report()
    assert (report["pattern"], report["density"], report["layers"]) == ("dense", 1.0, [])
    assert [layer["reason"] for layer in report["left_dense"]] == ["recipe dense"] * 2


# --- what a recipe refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "instead"),
    [
        (
            torch.optim.AdamW,
            "AdamW cannot: use nmrun.optim.AdamW, a drop-in with the same arguments",
        ),
        (torch.optim.Adam, "Adam cannot: use nmrun.optim.Adam or nmrun.optim.AdamW"),
        (torch.optim.SGD, "SGD cannot: use nmrun.optim.Adam or nmrun.optim.AdamW"),
    ],
)
def test_step_names_the_optimizer_it_needs(optimizer, instead):
    model = Net()
    given = optimizer(model.parameters(), lr=0.1)
    with one_line(ValueError, instead):
        nmrun.sparsify(model, given, "step", "2:4", 10, exclude=None)
    nmrun.sparsify(model, nmrun.optim.Adam(model.parameters()), "step", "2:4", 10, exclude=None)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_step_says_at_once_that_it_cannot_freeze(option):
    model = Net()
    optimizer = nmrun.optim.Adam(model.parameters(), **{option: True})
    with one_line(ValueError, "neither capturable=True nor differentiable=True"):
        nmrun.sparsify(model, optimizer, "step", "2:4", 10, exclude=None)
    nmrun.sparsify(model, optimizer, "step", "2:4", 10, exclude=None, second_moment="live")


@pytest.mark.parametrize(
    ("recipe", "hyperparameters", "message"),
    [
        ("step", {}, "step needs total_steps"),
        ("asp", {}, "asp needs total_steps.*prune_at=0"),
        (
            "asp",
            {"prune_at": math.nan, "total_steps": 9},
            "prune_at=nan: it takes a number at least",
        ),
        ("step", {"total_steps": 9, "eps_mode": "in"}, "eps_mode=in: it takes one of inside, outs"),
        ("step", {"total_steps": 9, "switch": "auto_geometrc"}, "did you mean auto_geometric"),
        ("step", {"total_steps": 9, "switch": 1.0}, "switch=1.0: it takes auto, .* or a fraction"),
        ("step", {"total_steps": 9, "t_min": 0.6}, "t_min=0.6, t_max=0.5 must be"),
    ],
)
def test_values_out_of_range(recipe, hyperparameters, message):
    model = Net()
    optimizer = nmrun.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=message):
        nmrun.sparsify(model, optimizer, recipe, "2:4", exclude=None, **hyperparameters)


@pytest.mark.parametrize("other", [{"eps": 1e-6}, {"betas": (0.9, 0.99)}])
@pytest.mark.parametrize("switch", ["auto", "auto_geometric", "variance_ratio", "gradient_norm"])
def test_step_wants_one_beta2_and_eps_for_what_it_pools(switch, other):
    model = Net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), **other}]
    optimizer = nmrun.optim.Adam(groups)
    with pytest.raises(ValueError, match="must share beta2 and eps"):
        nmrun.sparsify(model, optimizer, "step", "2:4", 10, switch=switch, exclude=None)


def test_at_a_fixed_switch_step_freezes_every_group_by_its_own_beta2_and_eps():
    """torch's Adam has the same dense steps, and v; the frozen tensor is sqrt(v / (1 - beta2^t) +
    eps)."""
    ends = []
    for kind in nmrun.optim.Adam, torch.optim.Adam:
        model = Net()
        groups = [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "eps": 1e-3, "betas": (0.9, 0.9)},
        ]
        optimizer = kind(groups)
        if kind is nmrun.optim.Adam:
            nmrun.sparsify(model, optimizer, "step", "2:4", 10, switch=0.4, exclude=None)
        for step in range(4):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([optimizer.state[model[i].weight] for i in (0, 2)])
    for ours, adams, beta2, eps in zip(*ends, (0.999, 0.9), (1e-8, 1e-3), strict=True):
        expected = (adams["exp_avg_sq"] / (1 - beta2**4) + eps).sqrt()
        torch.testing.assert_close(ours["frozen_denominator"], expected)
