"""What short trials find out before a run's first step: how many steps fill a budget of seconds, and
T-SR-STE's decay.

A trial is the run in miniature, from the same start. It leaves nothing behind but its result.

The decay is found by the flip-rate ratio (Hu et al. 2024, arXiv 2404.01847, the search in the warm-up
stage). Masks of a sparse run that goes well flip a little less often than the virtual masks of a dense
run. The ratio of the two rates should lie in [0.60, 0.95]: above, the decay is too weak; below, it
holds the masks too fast.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.keys.config import Config
from nmrun.lab.train.build import Parts, build, check_budget
from nmrun.lab.train.steps import TrainingSteps, log_interval, synchronize


def parts(
    config: Config, state: dict[str, Any] | None, accumulate: int, search: bool = True
) -> Parts:
    """Build the parts of a run, with what trials find out for it, or have found out for its
    checkpoint ``state``. Without ``search`` the decay of ``recipe.decay=auto`` is 0."""
    steps, decay, seconds, flops = None, 0.0, 0.0, Counter[str]()
    events: list[str] = []
    trainer = {**config.plain["trainer"], "accumulate": accumulate}
    config = Config({**config.plain, "trainer": trainer}, config.pattern)
    if (config.trainer.budget or "").startswith("seconds:"):
        if state:
            steps = state["total_steps"]
        else:
            steps, event = steps_of_budget(config)
            events.append(event)
    elif config.recipe.options.get("decay") == "auto":
        if search and state is None:
            decay, event, seconds, flops = find_decay(config)
            events.append(event)
        recipe = {**config.plain["recipe"], "decay": decay}
        config = Config({**config.plain, "recipe": recipe}, config.pattern)
    earlier = state or {}
    built = build(config, steps, earlier.get("acceleration"), earlier.get("precision"))
    return replace(built, seconds=built.seconds + seconds, flops=flops, events=events)


FIRST_LOOK = 6  # steps that say how long the trial can be
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
    check_budget(config, steps, epoch)
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


LOW, HIGH = 0.60, 0.95
GRID = (6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 2e-2, 6e-2)
PROBE = 0.1  # of the run's steps; never fewer than two mask intervals


class DecaySearch(NamedTuple):
    """What a search found; ``flops`` are by the names of ``TrainingSteps.flops``, without
    ``training_dense``."""

    decay: float
    event: str
    seconds: float
    flops: Counter[str]


class Probe(NamedTuple):
    """The mean share of mask entries that a refresh of the masks changes, and the FLOPs of it."""

    flip_rate: float
    flops: dict[str, int]


def find_decay(config: Config) -> DecaySearch:
    """Search up or down from 2e-4, by half powers of ten, for the first decay whose mu is in range.

    Every probe trains from the initial weights for a tenth of the run. If no value is in range, it
    is the one nearest to it in the direction of the search, which ``event`` tells.
    """
    began, flops = time.perf_counter(), Counter[str]()

    def rate(decay: float, dense: bool) -> float:
        found = probe(config, decay, dense)
        flops.update(found.flops)
        return found.flip_rate

    dense = rate(0.0, dense=True)
    if dense == 0:
        event = "decay search: no mask flips in the dense probe; decay 2e-4 is as good as any"
        return DecaySearch(2e-4, event, time.perf_counter() - began, flops)
    tried: dict[int, float] = {}
    index = GRID.index(2e-4)
    while 0 <= index < len(GRID) and index not in tried:
        tried[index] = rate(GRID[index], dense=False) / dense
        if LOW <= tried[index] <= HIGH:
            break
        index += 1 if tried[index] > HIGH else -1
    best = min(tried, key=lambda i: max(LOW - tried[i], tried[i] - HIGH, 0.0))
    rates = ", ".join(f"{GRID[i]:g}: {mu:.2f}" for i, mu in sorted(tried.items()))
    verdict = (
        "" if LOW <= tried[best] <= HIGH else f"; none is in [{LOW}, {HIGH}], this is the nearest"
    )
    event = (
        f"decay search: flip rate over that of a dense probe {rates}; decay {GRID[best]:g}{verdict}"
    )
    return DecaySearch(GRID[best], event, time.perf_counter() - began, flops)


def probe(config: Config, decay: float, dense: bool) -> Probe:
    """Train a tenth of the run with this decay; ``dense``: with masks that only look on."""
    plain = copy.deepcopy(config.plain)
    plain["recipe"] |= {"decay": decay, "dense_end": 0.0}
    trial = Config(plain, config.pattern)
    parts = build(trial)
    training, rule = TrainingSteps(trial, parts), parts.handle.recipe
    interval = plain["recipe"]["interval"]
    steps = min(parts.total_steps, max(2 * interval, round(PROBE * parts.total_steps)))
    if dense:
        rule.dense_forward = True
        parts.handle.refresh()
    masks = [weight["mask"] for weight in parts.handle.sparse]
    flips = refreshes = 0.0
    parts.model.train()
    for step in range(steps):
        before = [mask.clone() for mask in masks] if (step + 1) % interval == 0 else []
        training.train_step(*divmod(step, parts.task.batches_per_epoch), measure_flips=False)
        if before:
            refreshes += 1
            flips += sum(float((a ^ b).sum()) for a, b in zip(before, masks, strict=True))
    rate = flips / max(1.0, refreshes * sum(mask.numel() for mask in masks))
    return Probe(rate, {k: v for k, v in training.flops.items() if k != "training_dense"})
