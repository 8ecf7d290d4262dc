"""The rules of STEP's switch against plain-Python oracles that follow v and g themselves."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_autoswitch import EPS, Rms, begin, gradients, one_step, run
from torch import nn

import nmrun

T_MIN, T_MAX = 20, 100  # of 200 steps
CURVES: dict[str, Rms] = {
    "settles": lambda t: 1e-3 / math.sqrt(1 + t / 4),
    "settles late": lambda t: 1e-3 + 3e-3 * (t < 70),
    "never settles": lambda t: 1e-2,
    "settled from the start": lambda t: 1e-5,
    "a burst in the window": lambda t: 1e-4 + 1e-2 * (t == 25),
    "on the edge": lambda t: 3.2e-4 * (1 + (t // 15) % 2),
    "grows": lambda t: 1e-3 * 1.05**t,
    "grows, then stays": lambda t: 1e-3 * 1.1 ** min(t, 45),
    "jumps late": lambda t: 1e-3 * (1 + 20 * (t > 40)),
}
Measured = Callable[[list[list[float]], float], Iterator[tuple[float, bool]]]


def moments(grads: list[list[float]], beta2: float) -> Iterator[list[float]]:
    v = [0.0] * 48
    for g in grads:
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        yield v


def variance_ratio(grads: list[list[float]], beta2: float) -> Iterator[tuple[float, bool]]:
    norms, distance = [0.0], round(1 / (1 - beta2))  # v_0 = 0
    for t, v in enumerate(moments(grads, beta2), 1):
        norms.append(sum(map(abs, v)))
        if t > distance:
            yield norms[t - distance] / norms[t], norms[t - distance] / norms[t] > 0.96
        else:
            yield math.nan, False


def gradient_norm(grads: list[list[float]], beta2: float) -> Iterator[tuple[float, bool]]:
    norms, distance = [math.sqrt(sum(x * x for x in g)) for g in grads], round(1 / (1 - beta2))
    for t in range(len(grads)):
        if t >= distance:
            change = abs(norms[t - distance] - norms[t]) / norms[t - distance]
            yield change, change < 0.5
        else:
            yield math.nan, False


def autoswitch(
    partial: bool = False, threshold: float | None = None, geometric: bool = False
) -> Measured:
    def measured(grads: list[list[float]], beta2: float) -> Iterator[tuple[float, bool]]:
        window, before, length = [], [0.0] * 48, round(1 / (1 - beta2))
        for v in moments(grads, beta2):
            changes = [abs(a - b) for a, b in zip(v, before, strict=True)]
            z = sum(changes) / 48
            if geometric:
                moved = [c for c in changes if c > 0]
                z = math.exp(sum(map(math.log, moved)) / len(moved)) if moved else 0.0
            window, before = [*window, z][-length:], v
            measure = sum(window) / len(window)
            if threshold is not None:
                measure /= (1 - beta2) * sum(v) / 48
            enough = partial or len(window) == length
            yield measure, enough and measure < (EPS if threshold is None else threshold)

    return measured


def oracle(measured: Iterator[tuple[float, bool]]) -> tuple[int, bool]:
    """The step after which phase two begins, and whether the rule itself has fired."""
    for t, (_, settled) in enumerate(measured, 1):
        if t > T_MAX:
            return t, False
        if t > T_MIN and settled:
            return t, True
    raise AssertionError


CASES: dict[str, tuple[Measured, str, dict[str, Any]]] = {
    "auto": (autoswitch(), "auto", {}),
    "geometric": (autoswitch(geometric=True), "auto_geometric", {}),
    "ratio": (variance_ratio, "variance_ratio", {}),
    "gradient": (gradient_norm, "gradient_norm", {}),
    "partial": (autoswitch(True), "auto", {"window": "partial"}),
    "relative": (autoswitch(False, 1.3), "auto", {"threshold": 1.3}),
    "both": (autoswitch(True, 1.5), "auto", {"threshold": 1.5, "window": "partial"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("curve", "beta2", "dead"),
    [(curve, *((0.9, 0), (0.95, 20))[i % 2]) for i, curve in enumerate(CURVES)],
)
def test_switch_step_is_the_oracles(curve, case, beta2, dead):
    """``dead`` coordinates never have a gradient."""
    measured, rule, options = CASES[case]
    grads = gradients(CURVES[curve], dead)
    step, settled = oracle(measured(grads, beta2))
    switched, event = run(grads, rule, beta2, **options)
    assert switched == step
    assert event == ("rule" if settled else "t_max")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stop", [5, 33])
def test_resume_at_any_moment(case, stop):
    measured, rule, options = CASES[case]
    grads = gradients(CURVES["jumps late"])
    expected, _ = oracle(measured(grads, 0.95))
    model, optimizer, _ = begin(rule, 0.95, **options)
    for g in grads[: min(stop, expected - 1)]:
        one_step(model, optimizer, g)
    other, other_optimizer, other_handle = begin(rule, 0.95, **options)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    for t in range(min(stop, expected - 1) + 1, expected + 1):
        one_step(other, other_optimizer, grads[t - 1])
        assert (other_handle.phase == "sparse") == (t == expected)


@pytest.mark.parametrize("resumed", [0, 33, -1])
@pytest.mark.parametrize("case", CASES)
def test_where_no_step_waits_a_rule_fires_one_step_later(case, resumed):
    """As on a GPU, also when the run was resumed on the way, be it just before (-1). Where t_min
    decides, the measure was known before.
    """
    measured, rule, options = CASES[case]
    grads = gradients(CURVES["grows, then stays"])
    samples = list(measured(grads, 0.95))
    expected = next(
        t for t in range(1, 200) if t > T_MAX or (t > T_MIN and t > 1 and samples[t - 2][1])
    )
    model, optimizer, handle = begin(rule, 0.95, **options)
    handle.recipe.switching.waits = False
    for t, g in enumerate(grads[:expected], 1):
        assert handle.phase == "dense", t
        one_step(model, optimizer, g)
        if t == resumed % expected:
            parts, fresh = (model, optimizer), begin(rule, 0.95, **options)
            fresh[2].recipe.switching.waits = False
            for part, before in zip(fresh[:2], parts, strict=True):
                part.load_state_dict(before.state_dict())
            model, optimizer, handle = fresh
    assert handle.phase == "sparse"


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("ratio", "step/variance_ratio"),
        ("gradient", "step/gradient_norm_change"),
        ("relative", "step/variance_change_relative"),
    ],
)
def test_what_is_measured_is_logged(case, key):
    measured, rule, options = CASES[case]
    grads = gradients(CURVES["grows"])
    expected = [measure for measure, _ in measured(grads, 0.9)]
    model, optimizer, handle = begin(rule, 0.9, **{**options, "t_min": 0.4})
    for t, g in enumerate(grads[:40], 1):
        one_step(model, optimizer, g)
        if t > 11:
            assert handle.metrics()[key] == pytest.approx(expected[t - 1])


@pytest.mark.parametrize("options", [{"switch": "variance_ratio"}, {"threshold": 0.01}])
def test_a_group_without_gradients_from_the_second_step_on(options):
    """Its second moment stays, and no mean over the weights that move counts it. Adam's weight
    decay is added to the gradients of the other group alone."""
    used, rare = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
    groups = [{"params": layer.parameters()} for layer in (used, rare)]
    optimizer = nmrun.optim.Adam(groups, betas=(0.9, 0.5), weight_decay=0.1)
    handle = nmrun.sparsify(
        nn.ModuleList([used, rare]), optimizer, "step", "2:4", 20, exclude=None, **options
    )
    rare.weight.grad = torch.full((4, 8), 9.0)
    kept = float((9 + 0.1 * rare.weight).detach().square().sum()) / 2
    v = [0.0]
    for t in range(1, 5):
        used.weight.grad = torch.full((4, 8), float(t))
        v.append(v[-1] / 2 + float((t + 0.1 * used.weight).detach().square().sum()) / 2)
        optimizer.step()
        rare.weight.grad = None
    expected = {"step/variance_ratio": (v[2] + kept) / (v[4] + kept)}
    if "threshold" in options:  # the mean of the last two changes, over half of v
        expected = {"step/variance_change_relative": (v[4] - v[2]) / 2 / (v[4] / 2)}
    for key, value in expected.items():
        assert handle.metrics()[key] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("options", [{"window": "partial"}, {"threshold": 0.1}])
@pytest.mark.parametrize("rule", ["variance_ratio", "gradient_norm", 0.25])
def test_options_of_autoswitch_are_of_no_other_rule(rule, options):
    with pytest.raises(ValueError, match="are of switch=auto and auto_geometric"):
        begin(rule, **options)
