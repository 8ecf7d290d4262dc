"""``trainer.budget=seconds:...``: how many steps a run can do in so many seconds of training.

The number is planned before the run begins, so that the learning rate's schedule and the recipe's
phases end with the budget. It is measured in a trial: the run in miniature, phases included, from
the same start. The trial leaves nothing behind but the number.
"""

from __future__ import annotations

import time
from itertools import groupby

import torch

from nmrun import ranks
from nmrun.errors import ConfigError
from nmrun.lab.keys.config import Config
from nmrun.lab.train.build import build
from nmrun.lab.train.steps import Steps, log_interval, synchronize

FIRST_LOOK = 6  # steps that say how long the trial can be
SHARE = 0.05  # of the budget, for the trial
SHORTEST, LONGEST = 30, 300  # steps of the trial
WARM_UP = 3  # steps of a phase that are not counted: compilers, caches, a change of masks


def plan(config: Config) -> tuple[int, str]:
    """Compute the steps that fill ``trainer.budget=seconds:...``.

    Seconds are those of training steps: neither evaluation nor checkpoints, compilation or what
    happens once between two phases.

    Returns:
        The number of steps, and a sentence for the log.

    Raises:
        ConfigError: where the recipe cannot make a run of so few steps, or the budget is shorter
            than an epoch.
    """
    budget = str(config.trainer.budget)
    seconds = float(budget.removeprefix("seconds:"))
    rough, epoch = _trial(config, None, FIRST_LOOK, config.trainer.log_every)
    most = max(1, round(seconds / rough))
    length = min(max(SHORTEST, round(SHARE * most)), LONGEST)
    every = log_interval(config.trainer.log_every, most)
    while True:
        try:
            pace, _ = _trial(config, length, length, every)
            break
        except ConfigError:  # phases that do not fit into so few steps
            if length >= most:
                raise
            length = min(2 * length, most)
    steps = round(seconds / pace)
    if steps < epoch:
        raise ConfigError(
            f"trainer.budget={budget}: that is {steps / epoch:.2g} epochs; it takes one epoch or more"
        )
    return steps, (
        f"{steps} steps of {1e3 * pace:.3g} ms fill trainer.budget={budget}, "
        f"by a trial of {length} steps"
    )


def _trial(
    config: Config, total_steps: int | None, steps: int, log_every: int
) -> tuple[float, int]:
    """The mean seconds of the first ``steps`` of a run of ``total_steps`` (None: of
    ``trainer.epochs``), by :func:`mean_by_phase` and the leader's clock; and the batches of an
    epoch.
    """
    parts = build(config, total_steps)
    trial = Steps(config, parts)
    parts.model.train()
    taken: list[tuple[str, float]] = []
    for step in range(min(steps, parts.total_steps)):
        began = time.perf_counter()
        measure = (step + 1) % log_every == 0
        trial.train_step(*divmod(step, parts.task.batches_per_epoch), measure_flips=measure)
        synchronize(parts.device)
        taken.append((parts.handle.phase, time.perf_counter() - began))
    epoch = parts.task.batches_per_epoch
    del trial, parts
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return ranks.from_leader(mean_by_phase(taken)), epoch


def mean_by_phase(taken: list[tuple[str, float]]) -> float:
    """Compute the mean seconds of a step.

    Each phase counts by its number of steps, with the mean over all but its first ones (three, or
    half where there are few).

    Args:
        taken: the phase and the seconds of each step, in order.
    """
    total = 0.0
    for _, steps in groupby(taken, key=lambda step: step[0]):
        seconds = [second for _, second in steps]
        counted = seconds[min(WARM_UP, len(seconds) // 2) :]
        total += len(seconds) * sum(counted) / len(counted)
    return total / len(taken)
