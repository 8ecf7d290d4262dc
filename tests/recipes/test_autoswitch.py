"""AutoSwitch against a plain-Python oracle that follows v itself, and STEP's switch driven by
synthetic gradients.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import nmrun
from nmrun.recipes.switch import AutoSwitch
from nmrun.step.handle import Handle

TOTAL = 200
EPS = 1e-8
Rms = Callable[[int], float]


class Two(nn.Module):
    """Two sparse weights of different size, 48 coordinates in all, and a bias that AutoSwitch must
    not look at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4, bias=False), nn.Linear(4, 4)
        self.double()


def gradients(rms: Rms, dead: int = 0) -> list[list[float]]:
    """48 gradients a step of about this rms; the first ``dead`` are exactly zero."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(TOTAL, 48, generator=generator, dtype=torch.float64)
    draws[:, :dead] = 0.0
    return [(draws[t] * rms(t + 1)).tolist() for t in range(TOTAL)]


def oracle(
    grads: list[list[float]], beta2: float, geometric: bool, t_min: int, t_max: int
) -> tuple[int, str]:
    """The step after which phase two begins, and by which rule."""
    window, length = [], round(1 / (1 - beta2))
    v = [0.0] * 48
    for t, g in enumerate(grads, 1):
        new = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        changes = [abs(a - b) for a, b in zip(new, v, strict=True)]
        v = new
        if geometric:
            moved = [c for c in changes if c > 0]
            z = math.exp(sum(map(math.log, moved)) / len(moved)) if moved else 0.0
        else:
            z = sum(changes) / len(changes)
        window = [*window, z][-length:]
        if t > t_max:
            return t, "t_max"
        if t > t_min and len(window) == length and sum(window) / length < EPS:
            return t, "settled"
    return 0, "never"


def begin(
    switch: str | float, beta2: float = 0.9, **hyper: float
) -> tuple[Two, torch.optim.Optimizer, Handle]:
    model = Two()
    optimizer = nmrun.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, beta2), eps=EPS)
    return (
        model,
        optimizer,
        nmrun.sparsify(model, optimizer, "step", "2:4", TOTAL, switch=switch, **hyper),
    )


def one_step(model: Two, optimizer: torch.optim.Optimizer, grads: list[float]) -> None:
    values = torch.tensor(grads, dtype=torch.float64)
    model.a.weight.grad, model.b.weight.grad = values[:32].reshape(4, 8), values[32:].reshape(4, 4)
    model.b.bias.grad = torch.full((4,), 1e3, dtype=torch.float64)
    optimizer.step()


def run(
    grads: list[list[float]], switch: str | float, beta2: float = 0.9, **hyper: float
) -> tuple[int, str]:
    model, optimizer, handle = begin(switch, beta2, **hyper)
    for t, g in enumerate(grads, 1):
        assert handle.phase == "dense"
        one_step(model, optimizer, g)
        if handle.phase == "sparse":
            (event,) = handle.pop_events()
            assert event.startswith(f"step {t}: STEP freezes the second moment and learns masks")
            return t, event
    return 0, ""


CURVES: dict[str, Rms] = {
    "settles": lambda t: 1e-3 / math.sqrt(1 + t / 4),
    "settles late": lambda t: 1e-3 + 3e-3 * (t < 70),
    "never settles": lambda t: 1e-2,
    "settled from the start": lambda t: 1e-5,
    "a burst in the window": lambda t: 1e-4 + 1e-2 * (t == 25),
    "on the edge": lambda t: 3.2e-4 * (1 + (t // 15) % 2),
}


@pytest.mark.parametrize("dead", [0, 20])
@pytest.mark.parametrize("beta2", [0.9, 0.95])
@pytest.mark.parametrize("geometric", [False, True], ids=["arithmetic", "geometric"])
@pytest.mark.parametrize("curve", CURVES)
def test_switch_step_is_the_oracles(curve: str, geometric: bool, beta2: float, dead: int) -> None:
    grads = gradients(CURVES[curve], dead)
    step, rule = oracle(grads, beta2, geometric, t_min=20, t_max=100)
    found, event = run(grads, "auto_geometric" if geometric else "auto", beta2)
    assert found == step
    assert ("t > t_max = 100" if rule == "t_max" else "the variance has settled") in event
    assert f"threshold eps = {EPS:.0e}" in event


def test_the_curves_reach_every_rule() -> None:
    outcomes = {
        (curve, geometric): oracle(gradients(CURVES[curve]), 0.9, geometric, 20, 100)
        for curve in CURVES
        for geometric in (False, True)
    }
    assert {rule for _, rule in outcomes.values()} == {"t_max", "settled"}
    assert outcomes["settled from the start", False] == (21, "settled")  # t_min decides
    assert outcomes["never settles", False] == (101, "t_max")
    assert 21 < outcomes["settles", False][0] < 100
    assert outcomes["settles", True][0] != outcomes["settles", False][0]


def test_the_window_must_be_full() -> None:
    assert run(gradients(lambda t: 1e-6), "auto", 0.95, t_min=0.0)[0] == 20
    assert run(gradients(lambda t: 0.0), "auto_geometric", 0.95, t_min=0.0)[0] == 20


@pytest.mark.parametrize(
    ("beta2", "length"),
    [(0.9, 10), (0.95, 20), (0.98, 50), (0.99, 100), (0.999, 1000), (0.9999, 10_000)],
)
def test_window_length(beta2: float, length: int) -> None:
    switch = AutoSwitch(False, False, None, 0.1, 0.5, 100_000)
    assert switch.prepare(beta2, EPS, torch.device("cpu")) == []
    assert len(switch.window) == length


def test_a_window_longer_than_t_max_is_said_beforehand() -> None:
    model, optimizer, handle = begin("auto", beta2=0.999)
    (said,) = handle.pop_events()
    assert len(said.split()) == 6
    steps, switched = iter(gradients(lambda t: 1e-6)), 0
    while handle.phase == "dense":
        one_step(model, optimizer, next(steps))
        switched += 1
    assert str(switched) in said.split()
    _, _, handle = begin(0.25, beta2=0.999)
    assert handle.pop_events() == []


def test_a_fixed_switch_point() -> None:
    for rms in (lambda t: 1e-6, lambda t: 1.0):
        step, event = run(gradients(rms), 0.25)
        assert step == 50
        assert "fixed switch point, 50 steps" in event


def test_t_max_of_one_never_switches() -> None:
    assert run(gradients(lambda t: 1.0), "auto", t_max=1.0) == (0, "")


@pytest.mark.parametrize("stop", [5, 33, 60])
def test_resume_at_any_moment(stop: int) -> None:
    grads = gradients(CURVES["settles late"])
    wanted, _ = oracle(grads, 0.95, False, 20, 100)
    assert wanted > 60
    model, optimizer, handle = begin("auto", 0.95)
    for g in grads[:stop]:
        one_step(model, optimizer, g)
    other, other_optimizer, other_handle = begin("auto", 0.95)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    other_handle.load_state_dict(handle.state_dict())
    for t, g in enumerate(grads[stop:wanted], stop + 1):
        one_step(other, other_optimizer, g)
        assert (other_handle.phase == "sparse") == (t == wanted)


@pytest.mark.parametrize(
    "curve", ["settles", "settles late", "never settles", "settled from the start"]
)
@pytest.mark.parametrize("stop", [None, 33, "before"])
def test_where_no_step_waits_the_threshold_fires_one_step_later(
    curve: str, stop: int | str | None
) -> None:
    """As on a GPU, also when the run was resumed on the way, be it just before."""
    grads = gradients(CURVES[curve])
    wanted, rule = oracle(grads, 0.95, False, 20, 100)
    # where t_min decides, the mean was known before
    late = wanted + (rule == "settled" and wanted > 21)
    resumed = {None: 0, "before": late - 1}.get(stop, stop)
    model, optimizer, handle = begin("auto", 0.95)
    handle.recipe.switching.waits = False
    for t, g in enumerate(grads[:late], 1):
        assert handle.phase == "dense"
        one_step(model, optimizer, g)
        if t == resumed:
            other, other_optimizer, other_handle = begin("auto", 0.95)
            other_handle.recipe.switching.waits = False
            other.load_state_dict(model.state_dict())
            other_optimizer.load_state_dict(optimizer.state_dict())
            other_handle.load_state_dict(handle.state_dict())
            model, optimizer, handle = other, other_optimizer, other_handle
    assert handle.phase == "sparse"


def test_what_is_logged() -> None:
    grads = gradients(lambda t: 1e-2)
    model, optimizer, handle = begin("auto")
    v = [0.0] * 48
    samples = []
    for g in grads[:12]:
        one_step(model, optimizer, g)
        new = [0.9 * a + 0.1 * b * b for a, b in zip(v, g, strict=True)]
        samples.append(sum(abs(a - b) for a, b in zip(new, v, strict=True)) / 48)
        v = new
    metrics = handle.metrics()
    assert metrics["step/phase"] == 1.0
    assert metrics["step/variance_change"] == pytest.approx(samples[-1])
    assert metrics["step/variance_change_window"] == pytest.approx(sum(samples[-10:]) / 10)
    for g in grads[12:101]:
        one_step(model, optimizer, g)
    assert handle.metrics() == {"step/phase": 2.0}


def test_gradients_that_are_all_0_have_no_relative_change() -> None:
    model, optimizer, handle = begin("auto_geometric", threshold=1.2)
    for _ in range(3):
        one_step(model, optimizer, [0.0] * 48)
    metrics = handle.metrics()
    assert metrics["step/variance_change_window"] == 0.0
    assert "step/variance_change_relative" not in metrics
    one_step(model, optimizer, [1.0] * 48)
    # of the four samples one is 1 - beta2, and v has that size too
    assert handle.metrics()["step/variance_change_relative"] == pytest.approx(0.25 / 0.1)


def test_weights_without_a_gradient_do_not_count() -> None:
    model, optimizer, handle = begin("auto")
    for _ in range(2):
        model.a.weight.grad = torch.full((4, 8), 1e-2, dtype=torch.float64)
        model.b.weight.grad = model.b.bias.grad = None
        optimizer.step()
    # v is (1 - beta2) g^2 after a step, and moves by beta2 of that in the next
    assert handle.metrics()["step/variance_change"] == pytest.approx(0.9 * 0.1 * 1e-4)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_frozen_moment_is_bias_corrected_or_not(corrected: bool) -> None:
    """With a gradient that stays the same, v after t steps is (1 - beta2^t) g^2."""
    model, optimizer, handle = begin(0.05, bias_correction=corrected)
    for _ in range(10):
        assert handle.phase == "dense"
        one_step(model, optimizer, [1e-2] * 48)
    assert handle.phase == "sparse"
    v = 1e-4 if corrected else 1e-4 * (1 - 0.9**10)
    used = optimizer.state[model.a.weight]["frozen_denominator"]
    torch.testing.assert_close(used, torch.full((4, 8), math.sqrt(v + EPS)).double())
