"""Learning-rate schedules against closed forms."""

import math

import pytest

from nmrun.lab.train.optimizers import schedule_factor, scheduled


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules(warmup: int, final: float) -> None:
    total = 20
    for step in range(total + 5):
        done = min(1.0, (step - warmup) / (total - warmup))
        wanted = {
            "constant": 1.0,
            "linear": final + (1 - final) * (1 - done),
            "cosine": final + (1 - final) * (1 + math.cos(math.pi * done)) / 2,
        }
        for name, factor in wanted.items():
            rising = (step + 1) / warmup if step < warmup else factor
            assert schedule_factor(name, warmup, total, final)(step) == pytest.approx(
                rising, abs=1e-12
            )


def test_schedule_names_and_short_runs() -> None:
    with pytest.raises(ValueError, match="schedule 'cosin': allowed are constant, linear, cosine"):
        schedule_factor("cosin", 0, 10)
    assert [schedule_factor("cosine", 3, 3)(step) for step in range(3)] == pytest.approx(
        [1 / 3, 2 / 3, 1.0]
    )


@pytest.mark.parametrize("total", [20, 21, 40])
@pytest.mark.parametrize("cycles", [1, 2, 3])
def test_cycles_are_the_schedule_again_and_again(cycles: int, total: int) -> None:
    options = {"name": "cosine", "warmup": 0.2, "final": 0.1, "cycles": cycles}
    factor = scheduled(options, 1.0, total)
    wanted = []
    for cycle in range(cycles):
        steps = round((cycle + 1) * total / cycles) - round(cycle * total / cycles)
        warmup = round(0.2 * steps)
        for step in range(steps):
            done = (step - warmup) / (steps - warmup)
            cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
            wanted.append((step + 1) / warmup if step < warmup else cosine)
    assert [factor(step) for step in range(total)] == pytest.approx(wanted)
    assert factor(total + 5) == pytest.approx(0.1)
    # with two cycles, the step at which ASP prunes is the first of the second
    assert cycles != 2 or factor(round(0.5 * total)) == factor(0)
