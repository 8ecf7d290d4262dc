"""Learning-rate schedules against closed forms."""

import math

import pytest

from nmrun.train.schedules import schedule_factor


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
