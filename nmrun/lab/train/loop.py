"""The training loop: steps, evaluations and the best of them, checkpoints, and what is logged."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmrun import ranges
from nmrun.errors import RunError
from nmrun.fast.measurement import as_data
from nmrun.kernels.layout import local
from nmrun.lab import ranks
from nmrun.lab.keys.config import Config
from nmrun.lab.signals import Signals
from nmrun.lab.train import checkpoint
from nmrun.lab.train.build import Parts
from nmrun.lab.train.console import Console, facts, where
from nmrun.lab.train.steps import TrainingSteps, is_finite, log_interval, synchronize
from nmrun.lab.train.track import Tracker
from nmrun.lab.train.weights import Average
from nmrun.recipes.base import Event
from nmrun.sparsity.metrics import layer_metrics

# what a checkpoint keeps of the attributes of a loop and of its evaluations
FIELDS = ("row", "events", "seconds", "training_seconds")
EVALUATED = ("best", "best_weights", "candidates", "since_best", "last")


class Evaluation:
    """The evaluations of one run.

    Attributes:
        best: the metrics with the best ``task.metric`` while the forward weights held the pattern
            (for dense training: of all) and activations were pruned as in the last step.
        best_weights: the plain weights of that moment (this rank's parts of them).
        candidates: how many evaluations could have been the best.
        since_best: how many of them came after the best one.
        last: the metrics of the last evaluation, with their ``step``.
    """

    def __init__(self, steps: TrainingSteps, console: Console) -> None:
        self.steps, self.console = steps, console
        self.parts = parts = steps.parts
        self.task, self.model, self.handle = parts.task, parts.model, parts.handle
        self.trainer, self.strategy = steps.trainer, steps.strategy
        self.best: dict[str, float] = {}
        self.best_weights: dict[str, Tensor] = {}
        self.candidates = self.since_best = 0
        self.last: dict[str, float] = {}

    def row(self, signals: Signals) -> dict[str, float] | None:
        """Evaluate on the validation split, and keep the weights if they are the best so far.

        Returns what is logged; None, and nothing has changed, where a signal came before or meanwhile.
        RunError if the loss is not finite.
        """
        if ranks.any_of(signals.caught is not None):
            return None
        random = checkpoint.random_state()
        try:
            # a rank must not leave while the others wait for its share
            with signals.set("wait" if ranks.world() > 1 else "interrupt"):
                row = self.evaluate("val") | self.evaluate_dense("val")
        except KeyboardInterrupt:
            checkpoint.restore_random_state(random)
            return None
        self.last = {**row, "step": self.steps.step}
        sparse = self.handle.evaluates_sparse
        if self.handle.sparse:
            # of the projected weights; in a dense phase the forward pass uses others
            report = self.handle.report()
            row["sparsity/density"] = report["density"] if sparse else 1.0
            row |= layer_metrics(self.handle.sparse, self.handle.recipe)
            row["sparsity/holds"] = float(
                sparse and all(layer["holds"] for layer in report["layers"])
            )
            sparse &= self.trainer.evaluate != "dense"  # what is saved was not evaluated
        activations = self.parts.activations
        as_in_the_end = activations.sparse == activations.ends_sparse
        if as_in_the_end and (sparse or not self.handle.sparse):
            self.candidates += 1
            self.since_best += 1
            if self._is_best(row):
                self.since_best = 0
                scores = {key: value for key, value in row.items() if key.startswith("eval/")}
                self.best = {**scores, "epoch": self.steps.epoch, "step": self.steps.step}
                self.best_weights = self.strategy.final_state_dict()
        return row

    @property
    def is_patient(self) -> bool:
        """Whether training may go on, by ``trainer.patience``."""
        return self.trainer.patience is None or self.since_best < self.trainer.patience

    def _is_best(self, row: dict[str, float]) -> bool:
        metric = f"eval/{self.task.metric}"
        if math.isnan(row[metric]):  # such as a correlation with a constant
            return False
        sign = 1 if self.task.higher_is_better else -1
        return not self.best or sign * row[metric] > sign * self.best[metric]

    def evaluate(self, split: str) -> dict[str, float]:
        """The task's metrics with the weights as they are: ``eval/...`` for the split ``val``,
        ``test/...`` for ``test``; nothing where there is no test split."""
        return self._metrics(split, self.handle.evaluation_weights(), "")

    def evaluate_dense(self, split: str) -> dict[str, float]:
        """The task's metrics with the dense weights: with ``trainer.evaluate=dense`` in the place
        of :meth:`evaluate`'s, with ``both`` under ``eval/dense/`` and ``test/dense/``."""
        if self.trainer.evaluate == "sparse":
            return {}
        prefix = "dense/" if self.trainer.evaluate == "both" else ""
        return self._metrics(split, self.handle.dense_weights(), prefix)

    def _metrics(
        self, split: str, weights: contextlib.AbstractContextManager[None], prefix: str
    ) -> dict[str, float]:
        if split == "test" and not self.task.has_test:
            return {}
        ranks.share_statistics(self.model)
        self.model.eval()
        bar = self.console.evaluation("validating" if split == "val" else "testing")
        activations = self.parts.activations
        with bar, weights, torch.no_grad(), self.steps.autocast(), activations.measured() as sums:
            metrics = ranks.from_leader(self.task.evaluate(self.model, split))
        self.model.train()
        if activations.modules:
            metrics |= activations.shares(ranks.total(sums))
        name = "eval" if split == "val" else split
        if not math.isfinite(metrics.get("loss", 0.0)):
            what = f"{name}/loss is {metrics['loss']}"
            raise RunError(self.steps.not_finite(self.steps.step, what))
        return {f"{name}/{prefix}{key}": ranges.plain(value) for key, value in metrics.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :data:`EVALUATED`; weights may be whole or this rank's parts."""
        for name in EVALUATED:
            setattr(self, name, state[name])
        best = self.strategy.distribute(self.best_weights)
        self.best_weights = {name: tensor.to("cpu") for name, tensor in best.items()}


class Loop:
    """The training of one run; what changes while it goes on is in :meth:`state_dict`.

    Attributes:
        row: the row of a step whose evaluation was put off by a signal, else None.
        events: what happened, in order, as of :attr:`nmrun.recipes.base.Event.record`.
        seconds: of all sessions, including what the recipe took before the first step.
        training_seconds: of steps and their logging alone, without the first step of each session,
        which warms up.
    """

    def __init__(self, config: Config, parts: Parts, console: Console, run_id: str) -> None:
        self.steps, self.parts = TrainingSteps(config, parts), parts
        self.task, self.model, self.handle = parts.task, parts.model, parts.handle
        self.trainer, self.strategy = config.trainer, self.steps.strategy
        self.console, self.id = console, run_id
        self.acceleration = as_data({str(c.shape): c.times for c in parts.accelerated if c.times})
        batches, every = self.task.batches_per_epoch, self.trainer.checkpoint_every
        eval_steps = ranges.steps(self.trainer.eval_every)
        # in steps
        self.log_every = log_interval(self.trainer.log_every, self.parts.total_steps)
        self.eval_every = eval_steps or batches * int(self.trainer.eval_every)
        self.save_every = batches * every if isinstance(every, int) else batches
        self.row: dict[str, float] | None = None
        self.evaluation = Evaluation(self.steps, console)
        self.average = Average(self.model, self.handle, self.trainer.average)
        events = [*(Event(0, text) for text in parts.events), *self.handle.pop_events()]
        self.events = [event.record for event in events]
        self.seconds, self.training_seconds = parts.seconds, 0.0
        self.clock = checkpoint.CheckpointClock(ranges.seconds(every))
        self.logged: dict[str, float] = {}  # the last values

    def train(self, folder: Path, tracker: Tracker | None, signals: Signals) -> bool:
        """Train to the last step, or until ``trainer.patience`` ends or there is a signal, on any
        rank; returns whether training is over.

        ``checkpoint.pt`` in ``folder`` has the state then. ``tracker`` logs rows; None where
        another rank does. RunError if a loss is not finite.
        """
        earlier, began = self.seconds, time.perf_counter()
        begun = self.steps.step
        self._open_window()
        self.clock.begin()
        self.model.train()
        while self._goes_on or self.row is not None:
            row = self._step_row(self.steps.step > begun) if self.row is None else self.row
            step, evaluates = self.steps.step, self._is_due(self.eval_every)
            evaluated = self.evaluation.row(signals) if evaluates else {}
            self.row = row if evaluated is None else None
            row |= evaluated or {}
            if row and self.row is None:
                if tracker is not None:
                    tracker.log({"step": step, "epoch": self.steps.epoch, **row})
                self.logged |= row
            if evaluated:
                self._say_evaluation()
            if self.console.due():
                figures = "  ".join(facts(self.logged, self.task.metric))
                self.console.draw(where(self.steps), step, self.parts.total_steps, figures)
            if step < self.parts.total_steps and not self.evaluation.is_patient:
                self._say_early()

            self.seconds = earlier + time.perf_counter() - began
            # only the leader's clock counts, so that all ranks save after the same step
            caught, timely = ranks.each_of_any(
                signals.caught is not None, ranks.leads() and self.clock.due()
            )
            stop = caught or self.row is not None
            if save := self._is_due(self.save_every) or timely or stop or not self._goes_on:
                self._save(folder, tracker)
            if stop:
                return False
            if row or save:
                self._open_window()
        self.average.apply()
        return True

    @property
    def _goes_on(self) -> bool:
        return self.steps.step < self.parts.total_steps and self.evaluation.is_patient

    def _say_evaluation(self) -> None:
        cells = [where(self.steps), *facts(self.logged, self.task.metric, brief=True)]
        is_best = self.evaluation.best.get("step") == self.steps.step
        if is_best:
            cells.append("best")
        self.console.detail(f"  {'  '.join(cells)}", style="green" if is_best else "")

    def _say_early(self) -> None:
        best = self.evaluation.best
        event = Event(
            self.steps.step,
            f"ends early: eval/{self.task.metric} is best at step {best['step']}, "
            f"{self.evaluation.since_best} evaluations ago",
            "early",
        )
        self.events.append(event.record)
        self.console.say(f"  {event}")

    def _is_due(self, every: int, after: int = 0) -> bool:
        """Whether the step that was made, or one ``after`` it, is the last or one of ``every``."""
        step = self.steps.step + after
        return step % every == 0 or step == self.parts.total_steps

    def _step_row(self, warm: bool) -> dict[str, float]:
        """Make one step and return what is logged of it. The first step of a session is not
        ``warm``."""
        began, logs = time.perf_counter(), self._is_due(self.log_every, 1)
        batches = self.task.batches_per_epoch
        self.steps.train_step(*divmod(self.steps.step, batches), measure_flips=logs)
        if self._is_due(batches):
            self.average.add(-(-self.parts.total_steps // batches) - self.steps.epoch)
        for event in self.handle.pop_events():
            self.events.append(event.record)
            self.console.say(f"  {event}")
        row = self._training_row() | self._speed() if logs else {}
        if not warm or self._is_due(self.eval_every) or self._is_due(self.save_every):
            synchronize(self.parts.device)
        if warm:
            self.training_seconds += time.perf_counter() - began
        return row

    def _save(self, folder: Path, tracker: Tracker | None) -> None:
        with self.clock.saving():
            self.steps.check_losses()
            state = self.state_dict()
            if tracker is not None:
                tracker.sync()
                state["rows"] = tracker.mark
            checkpoint.save_next(folder, state)

    # --- what is logged ---------------------------------------------------------------------------

    def _training_row(self) -> dict[str, float]:
        losses = self.steps.check_losses()
        self.steps.losses = []
        row = {
            "train/loss": sum(losses) / len(losses),
            "lr": float(self.parts.optimizer.param_groups[0]["lr"]),
        }
        if self.steps.scaler.is_enabled():
            row["loss_scale"] = self.steps.scaler.get_scale()
        return row | {name: ranges.plain(value) for name, value in self.handle.metrics().items()}

    def _open_window(self) -> None:
        """Speeds count from here on."""
        self._window = (time.perf_counter(), self.steps.step, self.steps.items)

    def _speed(self) -> dict[str, float]:
        """Steps and items (images, tokens) a second."""
        began, step, items = self._window
        seconds = time.perf_counter() - began
        return {
            "steps_per_second": (self.steps.step - step) / seconds,
            "items_per_second": (self.steps.items - items) / seconds,
        }

    # --- the end ----------------------------------------------------------------------------------

    def finalize(self) -> dict[str, Tensor]:
        """End the training: evaluations use the final weights from here on. Returns these by name,
        exactly N:M (this rank's parts of them where they are sharded).

        RunError on all ranks, if one is not finite.
        """
        weights = self.strategy.final_state_dict()
        wrong = [name for name, part in weights.items() if not is_finite(local(part))]
        if wrong := sorted({name for names in ranks.gathered(wrong) for name in names}):
            what = f"parameter {wrong[0]} is not finite"
            raise RunError(self.steps.not_finite(self.steps.step, what))
        self.handle.finalize()
        return weights

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to end with the same bits."""
        state = self.steps.state_dict()
        state["loop"] |= {name: getattr(self, name) for name in FIELDS}
        state["loop"] |= {name: getattr(self.evaluation, name) for name in EVALUATED}
        state["loop"]["checkpoint_seconds"] = self.clock.spent
        return {
            **state,
            "average": self.average.state_dict(),
            "random": ranks.gathered(checkpoint.random_state()),
            "acceleration": self.acceleration,
            "precision": self.parts.precision,
            "total_steps": self.parts.total_steps,
            "id": self.id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps.load_state_dict(state)
        self.average.load_state_dict(state["average"], self.strategy.distribute)
        # with more ranks than before, new ones keep the generators that they have
        if ranks.rank() < len(state["random"]):
            checkpoint.restore_random_state(state["random"][ranks.rank()])
        for name in FIELDS:
            setattr(self, name, state["loop"][name])
        self.clock.spent = state["loop"]["checkpoint_seconds"]
        self.evaluation.load_state_dict(state["loop"])
