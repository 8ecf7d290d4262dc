"""How many steps fill a budget of seconds. A trial before the first step tells: the same run in
miniature, which leaves nothing behind."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.keys.config import Config
from nmrun.lab.train.build import Parts, assembled, build, check_length
from nmrun.lab.train.steps import TrainingSteps, log_interval, synchronize


def parts(config: Config, state: dict[str, Any] | None) -> Parts:
    """Assemble the parts of a run. A budget of seconds has the steps that a trial finds, or found
    for its checkpoint ``state``."""
    steps, events = None, list[str]()
    if (config.trainer.budget or "").startswith("seconds:"):
        if state:
            steps = state["total_steps"]
        else:
            steps, event = steps_of_budget(config)
            events.append(event)
    return replace(assembled(config, steps, (state or {}).get("precision")), events=events)


FIRST_LOOK = 6  # steps whose time decides how long the trial can be
SHARE = 0.05  # of the budget, for the trial
SHORTEST, LONGEST = 30, 300  # steps of the trial
WARM_UP = 3  # steps of a phase that are not counted: compilers, caches, a change of masks


def steps_of_budget(config: Config) -> tuple[int, str]:
    """The steps that fill ``trainer.budget=seconds:...``, and a sentence for the log.

    Seconds are those of training steps: neither evaluation nor checkpoints, compilation or what
    happens once between two phases. ConfigError where the recipe cannot make a run of so few steps,
    or the budget is shorter than an epoch, or than those that are averaged.
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
    check_length(config, steps, epoch)
    return steps, (
        f"{steps} steps of {1e3 * pace:.3g} ms fill trainer.budget={budget}, "
        f"by a trial of {length} steps"
    )


def _trial(
    config: Config, total_steps: int | None, steps: int, log_every: int
) -> tuple[float, int]:
    """The mean seconds of the first ``steps`` of a run, by :func:`mean_by_phase` and the leader's
    clock; and the batches of an epoch."""
    parts = build(config, total_steps)
    trial = TrainingSteps(config, parts)
    parts.model.train()
    durations: list[tuple[str, float]] = []
    for step in range(min(steps, parts.total_steps)):
        began = time.perf_counter()
        measure = (step + 1) % log_every == 0
        trial.train_step(*divmod(step, parts.task.batches_per_epoch), measure_flips=measure)
        synchronize(parts.device)
        durations.append((parts.handle.phase, time.perf_counter() - began))
    epoch = parts.task.batches_per_epoch
    del trial, parts
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return ranks.from_leader(mean_by_phase(durations)), epoch


def mean_by_phase(durations: list[tuple[str, float]]) -> float:
    """Compute the mean seconds of a step.

    Each phase counts by its number of steps, with the mean over all but its first ones (three, or
    half where there are few).

    Args:
        durations: the phase and the seconds of each step, in order.
    """
    total = 0.0
    for _, steps in groupby(durations, key=lambda step: step[0]):
        seconds = [second for _, second in steps]
        counted = seconds[min(WARM_UP, len(seconds) // 2) :]
        total += len(seconds) * sum(counted) / len(counted)
    return total / len(durations)
