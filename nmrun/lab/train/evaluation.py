"""Evaluations of a run: their metrics, and the best one."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from nmrun.errors import RunError
from nmrun.lab import ranks
from nmrun.lab.signals import Signals
from nmrun.lab.train import checkpoint, steps
from nmrun.lab.train.console import Console
from nmrun.lab.train.steps import TrainingSteps
from nmrun.lab.words.metric import higher_is_better
from nmrun.sparsity.metrics import layer_metrics


class Evaluation:
    """The evaluations of one run.

    Attributes:
        best: the metrics with the best ``task.metric`` while the forward weights held the pattern
            (for dense training: of all) and activations were pruned as in the last step.
        best_weights: the plain weights of that moment (this rank's parts of them).
        candidates: how many evaluations could have been the best.
        last: the metrics of the last evaluation, with their ``step``.
    """

    def __init__(self, steps: TrainingSteps, console: Console) -> None:
        self.steps, self.console = steps, console
        self.task, self.model, self.handle = steps.task, steps.model, steps.handle
        self.trainer, self.held = steps.trainer, steps.held
        self.best: dict[str, float] = {}
        self.best_weights: dict[str, Tensor] = {}
        self.candidates = 0
        self.last: dict[str, float] = {}
        self.improved = False

    def row(self, epoch: int, signals: Signals) -> dict[str, float] | None:
        """Evaluate on the validation split, and keep the weights if they are the best so far.

        Returns what is logged; None, and nothing has changed, where a signal came before or meanwhile.
        RunError if the loss is not finite.
        """
        if ranks.any_of(signals.caught is not None):
            return None
        random = checkpoint.random_state()
        try:
            # the other ranks wait for this one's share
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
        activations = self.steps.activations
        as_in_the_end = activations.sparse == activations.ends_sparse
        self.improved = False
        if as_in_the_end and (sparse or not self.handle.sparse):
            self.candidates += 1
            self.improved = self._is_best(row)
            if self.improved:
                scores = {key: value for key, value in row.items() if key.startswith("eval/")}
                self.best = {**scores, "epoch": epoch, "step": self.steps.step}
                self.best_weights = self.held.final_state_dict()
        return row

    def _is_best(self, row: dict[str, float]) -> bool:
        metric = f"eval/{self.task.metric}"
        if math.isnan(row[metric]):  # a correlation with what is constant, say
            return False
        sign = 1 if higher_is_better(metric) else -1
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
        beside = "dense/" if self.trainer.evaluate == "both" else ""
        return self._metrics(split, self.handle.dense_weights(), beside)

    def _metrics(
        self, split: str, weights: contextlib.AbstractContextManager[None], beside: str
    ) -> dict[str, float]:
        if split == "test" and not self.task.has_test:
            return {}
        ranks.share_statistics(self.model)
        self.model.eval()
        shown = self.console.evaluation("validating" if split == "val" else "testing")
        activations = self.steps.activations
        with shown, weights, torch.no_grad(), self.steps.autocast(), activations.measured() as sums:
            metrics = ranks.from_leader(self.task.evaluate(self.model, split))
        self.model.train()
        if activations.modules:
            metrics |= activations.shares(ranks.total(sums))
        name = "eval" if split == "val" else split
        if not math.isfinite(metrics.get("loss", 0.0)):
            names = steps.broken(self.model)
            where = f"parameter {names[0]}" if names else "an output, of finite weights"
            what = f"{name}/loss is {metrics['loss']}"
            raise RunError(self.steps.not_finite(self.steps.step, what, where))
        return {f"{name}/{beside}{key}": value for key, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        kept = {"best": self.best, "best_weights": self.best_weights}
        return {**kept, "candidates": self.candidates, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; weights may be whole or this rank's parts."""
        self.best, self.candidates = state["best"], state["candidates"]
        self.last = state.get("last", {})  # checkpoints of earlier versions have none
        best = self.held.handed_out(state["best_weights"])
        self.best_weights = {name: tensor.to("cpu") for name, tensor in best.items()}
