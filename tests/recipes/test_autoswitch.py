"""AutoSwitch, and STEP's switch driven by synthetic gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import nmrun
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


def begin(
    switch: str | float, beta2: float = 0.9, **hyper: float
) -> tuple[Two, torch.optim.Optimizer, Handle]:
    model = Two()
    optimizer = nmrun.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, beta2), eps=EPS)
    options = {"switch": switch, "exclude": None, **hyper}
    return model, optimizer, nmrun.sparsify(model, optimizer, "step", "2:4", TOTAL, **options)


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
            assert (event.kind, event.step) == ("switch", t)
            return t, event.facts["by"]
    return 0, ""


def test_a_window_longer_than_t_max_is_said_beforehand():
    model, optimizer, handle = begin("auto", beta2=0.999)
    (event,) = handle.pop_events()
    assert "window of 1,000 steps" in event.text
    steps, switched = iter(gradients(lambda t: 1e-6)), 0
    while handle.phase == "dense":
        one_step(model, optimizer, next(steps))
        switched += 1
    assert str(switched) in event.text.split()
    _, _, handle = begin(0.25, beta2=0.999)
    assert handle.pop_events() == []


def test_a_fixed_switch_point():
    for rms in (lambda t: 1e-6, lambda t: 1.0):
        assert run(gradients(rms), 0.25) == (50, "fixed")


@pytest.mark.parametrize("t_min", [0.1, 1.0])
def test_a_run_whose_t_max_is_its_end_ends_sparse(t_min):
    for t_max in (1.0, 0.999):
        rates = {"t_min": min(t_min, t_max), "t_max": t_max}
        assert run(gradients(lambda t: 1.0), "auto", **rates) == (TOTAL, "t_max")


def test_what_is_logged():
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


def test_gradients_that_are_all_0_have_no_relative_change():
    model, optimizer, handle = begin("auto_geometric", threshold=1.2)
    for _ in range(3):
        one_step(model, optimizer, [0.0] * 48)
    metrics = handle.metrics()
    assert metrics["step/variance_change_window"] == 0.0
    assert "step/variance_change_relative" not in metrics
    one_step(model, optimizer, [1.0] * 48)
    # of the four samples one is 1 - beta2, and v has that size too
    assert handle.metrics()["step/variance_change_relative"] == pytest.approx(0.25 / 0.1)


def test_weights_without_a_gradient_do_not_count():
    model, optimizer, handle = begin("auto")
    for _ in range(2):
        model.a.weight.grad = torch.full((4, 8), 1e-2, dtype=torch.float64)
        model.b.weight.grad = model.b.bias.grad = None
        optimizer.step()
    # v is (1 - beta2) g^2 after a step, and moves by beta2 of that in the next
    assert handle.metrics()["step/variance_change"] == pytest.approx(0.9 * 0.1 * 1e-4)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_frozen_moment_is_bias_corrected_or_not(corrected):
    """With a gradient that stays the same, v after t steps is (1 - beta2^t) g^2."""
    model, optimizer, handle = begin(0.05, bias_correction=corrected)
    for _ in range(10):
        assert handle.phase == "dense"
        one_step(model, optimizer, [1e-2] * 48)
    assert handle.phase == "sparse"
    v = 1e-4 if corrected else 1e-4 * (1 - 0.9**10)
    used = optimizer.state[model.a.weight]["frozen_denominator"]
    torch.testing.assert_close(used, torch.full((4, 8), math.sqrt(v + EPS)).double())


@pytest.mark.parametrize("beta2", [0.9, 0.95])
def test_the_rule_is_that_of_the_loaded_optimizer(beta2):
    """Its eps is the threshold and its beta2 the window, whatever the constructor was given."""
    model, optimizer, handle = begin("auto", beta2)
    other = Two()
    second = nmrun.optim.Adam(other.parameters(), lr=1e-3, betas=(0.9, 0.9), eps=1.0)
    loaded = nmrun.sparsify(other, second, "step", "2:4", TOTAL, exclude=None)
    second.load_state_dict(optimizer.state_dict())
    steps = 0
    while handle.phase == "dense":
        steps += 1
        for net, adam in ((model, optimizer), (other, second)):
            for p in net.parameters():
                p.grad = torch.full_like(p, 1e-3)
            adam.step()
        assert loaded.phase == handle.phase
    told, again = handle.pop_events()[-1], loaded.pop_events()[-1]
    assert told == again
    assert "threshold eps = 1e-08" in told.text
    assert 0.1 * TOTAL + 1 < steps <= 0.5 * TOTAL
