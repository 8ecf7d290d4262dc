"""The training loop, the only one: micro-batches, precision, clipping, schedule, evaluation,
checkpoints.

Recipes do not appear here. Their hooks hang on ``optimizer.step``, which sees the gradient of the
whole batch, unscaled and clipped.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmrun import ranks
from nmrun.config.metric import higher_is_better
from nmrun.errors import RunError
from nmrun.products.times import as_data
from nmrun.settings.config import Config
from nmrun.sparsity.metrics import layer_metrics
from nmrun.train import checkpoint, nonfinite
from nmrun.train.averaging import Average
from nmrun.train.build import Parts, autocast
from nmrun.train.console import Console
from nmrun.train.diagnostics import Diagnostics
from nmrun.train.flops import peak_flops
from nmrun.train.replicated import Replicated
from nmrun.train.schedules import scheduled
from nmrun.train.track import Tracker

SMALLEST_SCALE = 2.0**-24  # a loss scale below this means that no step can succeed any more


class Loop:
    """The training of one run; what changes while it goes on is in :meth:`state_dict`.

    ``step`` counts batches, ``updates`` the optimizer steps done (loss scaling may skip some).
    ``best`` is the evaluation with the best ``task.metric`` while the forward weights held the
    pattern (for dense training: of all), with its ``epoch``; ``best_weights`` are the plain weights
    of that moment (this rank's parts of them), and ``candidates`` the number of such evaluations.
    ``accumulate`` is how many micro-batches a batch is cut into. ``seconds`` and ``flops`` (of
    training) count all sittings, and what the recipe took beforehand.
    """

    def __init__(self, config: Config, parts: Parts, console: Console) -> None:
        self.trainer, self.console, self.accumulate = (
            config.trainer,
            console,
            config.trainer.accumulate,
        )
        self.task, self.model, self.optimizer, self.handle = (
            parts.task,
            parts.model,
            parts.optimizer,
            parts.handle,
        )
        self.device, self.precision, self.total_steps = (
            parts.device,
            parts.precision,
            parts.total_steps,
        )
        self.acceleration = as_data({str(c.shape): c.times for c in parts.accelerated if c.times})
        self.epochs = -(-self.total_steps // self.task.batches_per_epoch)
        self.forward: Any = self.model
        if how := self.trainer.compile:
            self.forward = torch.compile(
                self.model, fullgraph=True, mode=None if how is True else how
            )
        self.held = Replicated(self.model, self.optimizer, self.handle)
        # with FSDP no rank can pass through the model without the others
        self.in_step = ranks.world() > 1 and self.trainer.distributed == "fsdp"
        if self.in_step:
            from nmrun.train.sharded import Sharded  # half a second that others need not wait for

            self.held = Sharded(self.model, self.optimizer, self.handle)
        self.forward = self.held.forward(self.forward)
        if ranks.world() > 1:
            # dropout differs between ranks, the weights do not
            torch.manual_seed(config.seed + 1_000_003 * ranks.rank())
        self.scaler = torch.amp.grad_scaler.GradScaler(
            self.device.type, enabled=self.precision == "fp16"
        )
        self.lr_factor = scheduled(config.schedule.mapping(), config.optimizer.lr, self.total_steps)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]

        self.step = self.updates = self.logged_step = 0
        self.losses: list[
            Tensor
        ] = []  # of the steps since ``logged_step``, left on the device until they are logged
        self.best: dict[str, float] = {}
        self.best_weights: dict[str, Tensor] = {}
        self.candidates = 0
        self.average = Average(self.model, self.handle, self.trainer.average)
        self.events = self.handle.pop_events()
        self.handle.mask_metrics.begin()
        self.cost = parts.cost
        self.flops = {"training_arithmetic": 0, "training_hardware": 0, "training_dense": 0}
        self.diagnostics: Diagnostics | None = None
        if self.trainer.diagnose_every is not None:
            batch = self.task.micro_batches(0, 0, self.accumulate, range(1))[0]
            self.diagnostics = Diagnostics(self.model, self.handle, self.task, batch)
        self.seconds = parts.attached_in
        self.items = 0  # seen in this sitting
        self._shown: dict[str, float] = {}

    def train(self, folder: Path, tracker: Tracker | None, stopped: Callable[[], bool]) -> bool:
        """Train to the last step and return True, or False as soon as ``stopped()``;
        ``checkpoint.pt`` has the state then.
        """
        earlier, began = self.seconds, time.perf_counter()
        window_began, window_step, window_items = began, self.step, self.items
        self.model.train()
        while self.step < self.total_steps:
            epoch, index = divmod(self.step, self.task.batches_per_epoch)
            last = self.step + 1 == self.total_steps
            epoch_ends = index + 1 == self.task.batches_per_epoch
            log_due = last or (self.step + 1) % self.trainer.log_every == 0
            evaluate_due = last or (epoch_ends and (epoch + 1) % self.trainer.eval_every == 0)
            save_due = last or (epoch_ends and (epoch + 1) % self.trainer.checkpoint_every == 0)

            diagnostics = (
                None
                if (self.step + 1) % (self.trainer.diagnose_every or math.inf)
                else self.diagnostics
            )
            if diagnostics is not None:
                diagnostics.before()
            self._train_step(epoch, index, measure_flips=log_due)
            if epoch_ends or last:
                self.average.add(left=self.epochs - epoch - 1)
            for event in self.handle.pop_events():
                self.events.append(event)
                self.console.say(f"  {event}")
            row: dict[str, float] = {}
            if log_due:
                row |= self._training_row()
                row |= self._speed(
                    self.step - window_step,
                    self.items - window_items,
                    time.perf_counter() - window_began,
                )
            if diagnostics is not None:
                row |= diagnostics.after()
            if evaluate_due:
                row |= self._evaluation_row(epoch + 1)
            if row:
                if tracker is not None:
                    tracker.log({"step": self.step, "epoch": epoch + 1, **row})
                self._shown |= row
            self.console.progress(self.step, self.total_steps, self._status)
            if evaluate_due and not self.console.on_terminal:
                self.console.detail(f"  {self._status()}")

            self.seconds = earlier + time.perf_counter() - began
            stop = ranks.any_of(stopped()) and not last
            if save_due or stop:
                self._check_losses()
                state = self.state_dict()
                if tracker is not None:
                    tracker.sync()
                checkpoint.save_next(folder, state)
            if stop:
                return False
            if row:
                window_began, window_step, window_items = time.perf_counter(), self.step, self.items
        self.average.apply()
        return True

    def _train_step(self, epoch: int, index: int, measure_flips: bool) -> None:
        parts = self.accumulate * ranks.world()
        sizes = self.task.sizes(epoch, index, parts)
        items = sum(sizes)
        self._count_flops(items)
        mine = ranks.share(len(sizes), self.accumulate)
        batches = ranks.together(
            lambda: self.task.micro_batches(epoch, index, parts, mine or range(1))
        )
        shares = [
            (batch, sizes[number] / items) for number, batch in zip(mine, batches, strict=False)
        ]
        total = torch.zeros((), device=self.device)
        rounds = min(self.accumulate, len(sizes)) if self.in_step else 1
        shares += [(batches[0], 0.0)] * (rounds - len(shares))
        for number, (batch, share) in enumerate(shares, 1):
            if self.trainer.compile:
                torch.compiler.cudagraph_mark_step_begin()  # the last pass's outputs are done with
            with self._averaged_over_ranks(number >= len(shares)):
                with self.autocast():
                    loss = self.task.loss(self.forward, batch) * share
                self.scaler.scale(loss * ranks.world()).backward()
            total += loss.detach()
        self.step += 1
        self.losses.append(ranks.total(total))
        # elsewhere it would wait for the device: there losses are read when a row is logged
        if self.device.type == "cpu":
            self._check_losses()

        self.scaler.unscale_(self.optimizer)
        if self.trainer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.trainer.clip)
        factor = self.lr_factor(self.updates)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        self.handle.measure_flips = measure_flips
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # a lower scale: this step was skipped
        self.updates += int(self.scaler.get_scale() >= scale)
        self.optimizer.zero_grad(set_to_none=True)

    def _averaged_over_ranks(self, now: bool) -> contextlib.AbstractContextManager[Any]:
        """For a micro-batch: gradients are averaged over the ranks after the last one alone."""
        everywhere = now or ranks.world() == 1 or self.in_step  # FSDP keeps no whole gradient
        return contextlib.nullcontext() if everywhere else self.forward.no_sync()

    def _count_flops(self, items: int) -> None:
        self.items += items
        recipe = self.handle.recipe
        self.flops["training_arithmetic"] += round(items * self.cost.training(recipe))
        self.flops["training_hardware"] += round(items * self.cost.training(recipe, hardware=True))
        self.flops["training_dense"] += round(items * self.cost.dense)

    def count_beforehand(self, seconds: float, flops: Mapping[str, int]) -> None:
        """Count what was needed before the first step as part of the run."""
        self.seconds += seconds
        for name, number in flops.items():
            self.flops[name] += number

    @property
    def flops_used(self) -> dict[str, int]:
        """FLOPs of the training steps so far, those of a search for the decay included, and of
        inference with the final weights on one item; see ``nmrun.train.flops.Flops``.

        ``..._arithmetic`` leaves out every multiplication with a zero that the recipe puts there,
        ``..._hardware`` what 2:4 sparse tensor cores can leave out, ``training_dense`` is the run's
        own number of dense steps.
        """
        inference = {"arithmetic": self.cost.forward_sparse, "hardware": self.cost.forward_hardware}
        return {
            **self.flops,
            **{f"inference_{kind}": round(flops) for kind, flops in inference.items()},
        }

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of every forward pass."""
        return autocast(self.device, self.precision)

    # --- what is logged ---------------------------------------------------------------------------

    def _training_row(self) -> dict[str, float]:
        losses = self._check_losses()
        self.losses, self.logged_step = [], self.step
        row = {
            "train/loss": sum(losses) / len(losses),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        if self.scaler.is_enabled():
            row["loss_scale"] = self.scaler.get_scale()
        return row | self.handle.metrics()

    def _speed(self, steps: int, items: int, seconds: float) -> dict[str, float]:
        """Steps and items (images, tokens) a second and, where the device's peak is known, ``mfu``:
        the share of it that a dense network's FLOPs take up (model FLOPs utilisation, Chowdhery et
        al. 2022, appendix B)."""
        row = {"steps_per_second": steps / seconds, "items_per_second": items / seconds}
        peak = peak_flops(self.device, self.precision)
        return (
            row
            if peak is None
            else {**row, "mfu": row["items_per_second"] * self.cost.dense / (peak * ranks.world())}
        )

    def _evaluation_row(self, epoch: int) -> dict[str, float]:
        row = self.evaluate("val")
        if self.handle.sparse:
            # of the projected weights; in a dense phase the forward pass uses others
            report = self.handle.report()
            row["sparsity/density"] = report["density"] if self.handle.is_sparse else 1.0
            row |= layer_metrics(self.handle.sparse, self.handle.recipe)
            row["sparsity/holds"] = float(
                self.handle.is_sparse and all(layer["holds"] for layer in report["layers"])
            )
        candidate = self.handle.is_sparse or not self.handle.sparse
        self.candidates += candidate
        if candidate and self._is_best(row):
            self.best = {
                **{key: value for key, value in row.items() if key.startswith("eval/")},
                "epoch": epoch,
            }
            self.best_weights = self.held.final_state_dict()
        return row

    def _is_best(self, row: dict[str, float]) -> bool:
        metric = f"eval/{self.task.metric}"
        sign = 1 if higher_is_better(metric) else -1
        return not self.best or sign * row[metric] > sign * self.best[metric]

    def evaluate(self, split: str) -> dict[str, float]:
        """The task's metrics with the weights as they are: ``eval/...`` for split ``"val"``,
        ``test/...`` for ``"test"``, nothing where there is no test split.
        """
        if split == "test" and not self.task.has_test:
            return {}
        ranks.share_statistics(self.model)
        self.model.eval()
        with torch.no_grad(), self.autocast():
            metrics = ranks.from_leader(self.task.evaluate(self.model, split))
        self.model.train()
        return {
            f"{'eval' if split == 'val' else split}/{key}": value for key, value in metrics.items()
        }

    def _status(self) -> str:
        epoch = -(-self.step // self.task.batches_per_epoch)
        shown = [
            ("loss", "train/loss", ".4f"),
            (self.task.metric, f"eval/{self.task.metric}", ".4f"),
            ("lr", "lr", ".2e"),
            ("steps/s", "steps_per_second", ".0f"),
        ]
        parts = [
            f"epoch {epoch}/{self.epochs}",
            *([f"{self.handle.phase} phase"] if self.handle.sparse else []),
        ]
        return "  ".join(
            parts
            + [
                f"{word} {self._shown[key]:{form}}"
                for word, key, form in shown
                if key in self._shown
            ]
        )

    # --- what can go wrong ------------------------------------------------------------------------

    def _check_losses(self) -> list[float]:
        """The losses since the last training row. Raises RunError, with what is known, if one is
        not finite.
        """
        losses: list[float] = torch.stack(self.losses).tolist() if self.losses else []
        for step, loss in enumerate(losses, self.logged_step + 1):
            if not math.isfinite(loss):
                raise RunError(self._diagnosis(step, f"the loss is {loss}"))
        if self.scaler.is_enabled() and self.scaler.get_scale() < SMALLEST_SCALE:
            raise RunError(
                self._diagnosis(self.step, "no gradient is finite, however small the loss scale")
            )
        return losses

    def _diagnosis(self, step: int, what: str) -> str:
        epoch, index = divmod(step - 1, self.task.batches_per_epoch)
        batches = self.task.micro_batches(epoch, index, self.accumulate)
        where = "looked for with trainer.distributed=ddp only"
        if not self.in_step:
            where = nonfinite.culprit(self.model, self.task, batches, self.autocast)
        advice = [
            f"a lower optimizer.lr (it was {self.base_lrs[0] * self.lr_factor(self.updates):.3g})"
        ]
        advice += ["trainer.clip=1"] if self.trainer.clip is None else []
        advice += ["trainer.precision=bf16 or fp32"] if self.precision == "fp16" else []
        advice += ["trainer.precision=fp32"] if self.precision == "bf16" else []
        return (
            f"step {step}: {what}; the first non-finite value is {where}. Try {', '.join(advice)}"
        )

    def finalize(self) -> dict[str, Tensor]:
        """Training is over: the weights that are left (parts of them where they are sharded), exactly
        N:M, which evaluations use from here on.
        """
        weights = self.held.final_state_dict()
        self.handle.finalize()
        return weights

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to end with the same bits: tensors (this rank's parts of what
        is sharded) and plain data."""
        return {
            **self.held.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict(),
            "random": ranks.gathered(checkpoint.random_state()),
            "acceleration": self.acceleration,
            "loop": {
                "step": self.step,
                "accumulate": self.accumulate,
                "updates": self.updates,
                "logged_step": self.logged_step,
                "losses": list(self.losses),
                "best": self.best,
                "best_weights": self.best_weights,
                "candidates": self.candidates,
                "events": self.events,
                "flops": dict(self.flops),
                "seconds": self.seconds,
            },
            **({"diagnostics": self.diagnostics.state_dict()} if self.diagnostics else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.held.load_state_dict(state)
        self.scaler.load_state_dict(state["scaler"])
        self.average.load_state_dict(state["average"], self.held.handed_out)
        # more ranks than before: the new ones draw from where they are
        if ranks.rank() < len(state["random"]):
            checkpoint.restore_random_state(state["random"][ranks.rank()])
        for name, value in state["loop"].items():
            setattr(self, name, value)
        self.losses = [loss.to(self.device) for loss in self.losses]
        best = self.held.handed_out(self.best_weights)
        self.best_weights = {name: tensor.to("cpu") for name, tensor in best.items()}
        if self.diagnostics is not None:
            self.diagnostics.load_state_dict(state.get("diagnostics"))
