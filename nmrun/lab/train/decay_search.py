"""T-SR-STE's decay factor by the flip-rate ratio (Hu et al. 2024, arXiv 2404.01847, the search in
the warm-up stage).

Masks of a sparse run that is going well flip a little less often than the virtual masks of a dense
run: the ratio mu of the two rates should lie in [0.60, 0.95]. Above, the decay is too weak and
masks keep oscillating; below, it holds them too fast.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from typing import NamedTuple

from nmrun.lab.keys.config import Config
from nmrun.lab.train.build import build
from nmrun.lab.train.steps import Steps

LOW, HIGH = 0.60, 0.95
GRID = (6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 2e-2, 6e-2)
PROBE = 0.1  # of the run's steps; never fewer than two mask intervals


class Found(NamedTuple):
    """What a search found.

    Attributes:
        decay: the decay.
        said: a sentence for the log.
        seconds: what the search took.
        flops: likewise, by the names of :attr:`nmrun.lab.train.steps.Steps.flops`, without
            ``training_dense``.
    """

    decay: float
    said: str
    seconds: float
    flops: Counter[str]


class Probe(NamedTuple):
    """The mean share of mask entries that a refresh of the masks changes, and the FLOPs of it."""

    flip_rate: float
    flops: dict[str, int]


def find_decay(config: Config, total_steps: int | None = None) -> Found:
    """Search up or down from 2e-4, by half powers of ten, for the first decay whose mu is in range.

    Every probe trains from the initial weights for a tenth of the run.

    Args:
        config: of recipe t_sr_ste.
        total_steps: of the run, where they are planned; None: those of ``trainer.epochs``.

    Returns:
        That decay. If no value is in range, the one nearest to it in the direction of the search,
        which ``said`` tells.
    """
    began, flops = time.perf_counter(), Counter[str]()

    def rate(decay: float, dense: bool) -> float:
        probe = _probe(config, decay, dense, total_steps)
        flops.update(probe.flops)
        return probe.flip_rate

    dense = rate(0.0, dense=True)
    if dense == 0:
        said = "decay search: no mask flips in the dense probe; decay 2e-4 is as good as any"
        return Found(2e-4, said, time.perf_counter() - began, flops)
    tried: dict[int, float] = {}
    at = GRID.index(2e-4)
    while 0 <= at < len(GRID) and at not in tried:
        tried[at] = rate(GRID[at], dense=False) / dense
        if LOW <= tried[at] <= HIGH:
            break
        at += 1 if tried[at] > HIGH else -1
    best = min(tried, key=lambda i: max(LOW - tried[i], tried[i] - HIGH, 0.0))
    shown = ", ".join(f"{GRID[i]:g}: {mu:.2f}" for i, mu in sorted(tried.items()))
    verdict = (
        "" if LOW <= tried[best] <= HIGH else f"; none is in [{LOW}, {HIGH}], this is the nearest"
    )
    said = (
        f"decay search: flip rate over that of a dense probe {shown}; decay {GRID[best]:g}{verdict}"
    )
    return Found(GRID[best], said, time.perf_counter() - began, flops)


def _probe(config: Config, decay: float, dense: bool, total_steps: int | None = None) -> Probe:
    """A short training."""
    plain = copy.deepcopy(config.plain)
    plain["recipe"] |= {"decay": decay, "dense_end": 0.0}
    trial = Config(plain, config.pattern)
    parts = build(trial, total_steps)
    training, rule = Steps(trial, parts), parts.handle.recipe
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
