"""The training step: micro-batches, precision, clipping and the learning rate around one
``optimizer.step``.

Recipes do not appear here. Their hooks hang on ``optimizer.step``, which sees the gradient of the
whole batch, unscaled and clipped. A trial before the first step tells how many fill a budget of
seconds: the same run in miniature, which leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError
from nmrun.lab import ranks
from nmrun.lab.keys.config import Config
from nmrun.lab.tasks.base import Batch
from nmrun.lab.train.build import Parts, autocast, build, check_length
from nmrun.lab.train.optimizers import scheduled
from nmrun.lab.train.weights import Replicated

COUNTS = ("step", "updates", "losses", "flops")  # what a checkpoint keeps of the attributes
SMALLEST_SCALE = 2.0**-24  # a loss scale below this means that no step can succeed any more
MOST_ROWS = 20_000  # of training steps in metrics.jsonl: ten to twenty megabytes of a small network


class TrainingSteps:
    """The training steps of one run, and no more: trials need neither evaluation nor files.

    Attributes:
        strategy: how the processes hold model and optimizer.
        forward: the model that a step calls: compiled, averaging gradients over the ranks.
        step: the batches so far. ``updates``: the optimizer steps (loss scaling may skip some).
        losses: of the steps since the last training row, on the device until they are logged.
        items: seen since the process began.
    """

    def __init__(self, config: Config, parts: Parts) -> None:
        self.trainer, self.parts = config.trainer, parts
        forward: Any = parts.model
        if self.trainer.compile:
            forward = torch.compile(parts.model, fullgraph=True)
        self.strategy = Replicated(parts.model, parts.optimizer, parts.handle)
        if ranks.world() > 1 and self.trainer.distributed == "fsdp":
            from nmrun.lab.train.fsdp import Sharded  # half a second that others need not wait for

            self.strategy = Sharded(parts.model, parts.optimizer, parts.handle)
        self.forward: Any = self.strategy.forward(forward)
        if ranks.world() > 1:
            # dropout differs between ranks, the weights do not
            torch.manual_seed(config.seed + 1_000_003 * ranks.rank())
        self.scaler = torch.amp.grad_scaler.GradScaler(
            parts.device.type, enabled=parts.precision == "fp16"
        )
        self.lr_factor = scheduled(
            config.schedule.mapping(),
            config.optimizer.lr,
            parts.total_steps,
            parts.task.batches_per_epoch,
        )
        self.base_lrs = [float(group["lr"]) for group in parts.optimizer.param_groups]
        self.step = self.updates = self.items = 0
        self.losses: list[Tensor] = []
        self.flops = {f"training_{kind}": 0 for kind in ("arithmetic", "hardware", "dense")}
        parts.handle.stepper.mask_metrics.begin()

    def train_step(self, epoch: int, index: int, measure_flips: bool) -> None:
        """Make one step; ``epoch`` and ``index`` of the batch count from 0. RunError on a CPU, if
        the loss is not finite."""
        model, optimizer = self.parts.model, self.parts.optimizer
        self.parts.activations.at(self.step)
        shares = self._shares(epoch, index)
        total = torch.zeros((), device=self.parts.device)
        for number, (batch, share) in enumerate(shares, 1):
            with self._averaged_over_ranks(number == len(shares)):
                with self.autocast():
                    loss = self.parts.loss(self.forward, batch) * share
                self.scaler.scale(loss * ranks.world()).backward()
            total += loss.detach()
        self.step += 1
        self.losses.append(ranks.total(total))
        # on a GPU this would wait for the device: there losses are read when a row is logged
        if self.parts.device.type == "cpu":
            self._check(self.step, [self.losses[-1].item()])

        self.scaler.unscale_(optimizer)
        if self.trainer.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.trainer.clip)
        factor = self.lr_factor(self.updates)
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        self.parts.handle.measure_flips = measure_flips
        scale = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        # a lower scale: this step was skipped
        self.updates += int(self.scaler.get_scale() >= scale)
        optimizer.zero_grad(set_to_none=True)

    @property
    def epoch(self) -> int:
        """That of the last step, from 1; 0 before the first step."""
        return -(-self.step // self.parts.task.batches_per_epoch)

    def _shares(self, epoch: int, index: int) -> list[tuple[Batch, float]]:
        """This rank's micro-batches and their shares in the batch's loss. A rank that has none
        takes part with one whose share is 0."""
        task, accumulate = self.parts.task, self.trainer.accumulate
        number_of_parts = accumulate * ranks.world()
        sizes = task.sizes(epoch, index, number_of_parts)
        self._count(items := sum(sizes))
        share = ranks.share(len(sizes), accumulate)
        batches = ranks.together(
            lambda: task.micro_batches(epoch, index, number_of_parts, share or range(1))
        )
        shares = [
            (batch, sizes[number] / items) for number, batch in zip(share, batches, strict=False)
        ]
        rounds = min(accumulate, len(sizes)) if self.strategy.in_step else 1
        return shares + [(batches[0], 0.0)] * (rounds - len(shares))

    def _averaged_over_ranks(self, now: bool) -> contextlib.AbstractContextManager[Any]:
        """For a micro-batch: gradients are averaged over the ranks after the last one alone."""
        if now or ranks.world() == 1 or self.strategy.in_step:  # FSDP keeps no whole gradient
            return contextlib.nullcontext()
        return cast(contextlib.AbstractContextManager[Any], self.forward.no_sync())

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self.parts.device, self.parts.precision)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of model, optimizer and scaler, and the counts under ``loop``."""
        counts = {name: copy.copy(getattr(self, name)) for name in COUNTS}
        return {**self.strategy.state_dict(), "scaler": self.scaler.state_dict(), "loop": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.strategy.load_state_dict(state)
        self.scaler.load_state_dict(state["scaler"])
        for name in COUNTS:
            setattr(self, name, state["loop"][name])
        self.losses = [loss.to(self.parts.device) for loss in self.losses]
        self.parts.activations.at(max(0, self.step - 1))  # evaluations prune as the last step did

    # --- what it costs ----------------------------------------------------------------------------

    def _count(self, items: int) -> None:
        self.items += items
        recipe, cost = self.parts.handle.recipe, self.parts.cost
        self.flops["training_arithmetic"] += round(items * cost.training(recipe))
        self.flops["training_hardware"] += round(items * cost.training(recipe, hardware=True))
        self.flops["training_dense"] += round(items * cost.dense)

    @property
    def flops_used(self) -> dict[str, int]:
        """FLOPs of the training steps so far, and of inference with the final weights on one item.

        ``..._arithmetic`` leaves out every multiplication with a zero that the recipe puts there;
        ``..._hardware`` leaves out what 2:4 sparse tensor cores can. ``training_dense`` is of as
        many dense steps.
        """
        cost, ends_dense = self.parts.cost, bool(self.parts.handle.recipe.ends_dense)
        return {
            **self.flops,
            "inference_arithmetic": round(cost.inference(False, ends_dense)),
            "inference_hardware": round(cost.inference(True, ends_dense)),
        }

    # --- what can go wrong ------------------------------------------------------------------------

    def check_losses(self) -> list[float]:
        """Read the losses since the last training row. RunError if one is not finite, or the loss
        scale is too small."""
        losses: list[float] = torch.stack(self.losses).tolist() if self.losses else []
        self._check(self.step - len(losses) + 1, losses)
        return losses

    def _check(self, first: int, losses: list[float]) -> None:
        """Check the ``losses`` of consecutive steps from ``first`` on."""
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):
                raise RunError(self.not_finite(step, f"the loss is {loss}"))
        if self.scaler.is_enabled() and self.scaler.get_scale() < SMALLEST_SCALE:
            what = "no gradient is finite, however small the loss scale"
            raise RunError(self.not_finite(self.step, what))

    def not_finite(self, step: int, what: str) -> str:
        """A sentence on what is not finite, at which step (from 1), and what to try."""
        task = self.parts.task
        batch = task.micro_batches(
            *divmod(step - 1, task.batches_per_epoch), self.trainer.accumulate
        )
        if not all(is_finite(tensor) for part in batch for tensor in part):
            return f"step {step}: {what}, and so is a number in its batch"
        lr = self.base_lrs[0] * self.lr_factor(self.updates)
        tries = [f"a lower optimizer.lr (it was {lr:.3g})"]
        if self.trainer.clip is None:
            tries.append("trainer.clip=1")
        if self.parts.precision != "fp32":
            tries.append("trainer.precision=fp32")
        return f"step {step}: {what}. Try {', '.join(tries)}"


def log_interval(every: int, total_steps: int) -> int:
    """The steps between two training rows: ``every``, or the smallest multiple of it that gives
    ``MOST_ROWS`` at most."""
    return every * max(1, -(-total_steps // (every * MOST_ROWS)))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock shows it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity; whole numbers have none."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


# --- a budget of seconds --------------------------------------------------------------------------

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
