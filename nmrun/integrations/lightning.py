"""Lightning's Trainer: ``Trainer(callbacks=[NMCallback("step", "2:4")])``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from torch.distributed.checkpoint.filesystem import FileSystemReader

from nmrun.errors import ConfigError
from nmrun.integrations.training import Training, end, warn_if_late
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.step.handle import Handle
from nmrun.step.resume import KEY, saved_settings


class NMCallback(Training, Callback):
    """Lets Lightning train with N:M sparse weights. ::

        trainer = Trainer(max_epochs=10, callbacks=[NMCallback("sr_ste", "2:4")])
        trainer.fit(module, loader)

    Checkpoints are plain, and ``ckpt_path`` resumes with the same bits.
    ``StochasticWeightAveraging`` averages the dense weights; the average becomes N:M.
    ``ModelCheckpoint`` and ``EarlyStopping`` begin anew when the weights become sparse. ``handle``
    is there from the beginning of the training on. Validation is by
    :meth:`nmrun.Handle.evaluation_weights`.

    Args:
        total_steps: steps of this optimizer in the whole run. None, the default: as the Trainer
            estimates with automatic optimization, and ``max_steps`` with manual. Of several
            optimizers Lightning counts all steps together, so they need it for recipes with phases.
        optimizer: which of the module's optimizers has the sparse weights, from 0; a module with
            several must say so.
        options: other arguments of :func:`nmrun.sparsify`. Recipe, pattern and hyperparameters are
            checked here, the rest when the training begins.
    """

    def __init__(
        self,
        recipe: str | Recipe = "sr_ste",
        pattern: str | Pattern = "2:4",
        total_steps: int | None = None,
        optimizer: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(recipe, pattern, total_steps, **options)
        self._optimizer, self._dense_steps, self._has_batches = optimizer, 0, False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the checkpoint of an earlier call of the Trainer."""
        self._dense_steps, self._has_batches = 0, False

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note the steps of a checkpoint that is of a dense training: the recipe begins after them.
        Shards (FSDP2) are loaded later, see :func:`load_with_room`."""
        self._dense_steps = 0 if is_sparse_training(checkpoint) else checkpoint["global_step"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the weights sparse; the optimizer's state is loaded after this. Raises ConfigError
        as :func:`nmrun.sparsify`, for several optimizers none of which was named, for
        ``WeightAveraging``, and for a Trainer of the package ``pytorch_lightning``, whose callbacks
        are other classes."""
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"this Trainer is of {type(trainer).__module__}: use that of lightning.pytorch"
            )
        averaging = getattr(callbacks, "WeightAveraging", None)
        if averaging and any(isinstance(each, averaging) for each in _callbacks(trainer)):
            raise ConfigError(
                "WeightAveraging averages and saves what the network computes with, and an average "
                "of N:M weights is not N:M: use StochasticWeightAveraging"
            )
        if _has_no_steps(trainer):
            self.handle = None
            return
        count, number = len(trainer.optimizers), self._optimizer
        if number is None and count == 1:
            number = 0
        if number is None or number not in range(count):
            raise ConfigError(
                f"this module's optimizers are {count}: say which one has the sparse weights, as by "
                "NMCallback(optimizer=0)"
            )
        optimizer = trainer.optimizers[number]
        steps = None if self._total_steps else planned_steps(trainer, pl_module)

        def start(made: int) -> Handle:
            handle = self._begin(pl_module, optimizer, steps, made=made)
            for each in _callbacks(trainer):
                if isinstance(each, callbacks.StochasticWeightAveraging):
                    average_dense(each, handle)
            return handle

        handle = start(trainer.global_step if trainer.ckpt_path is None else self._dense_steps)
        load_with_room(trainer.strategy, handle, start)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the phase, after a checkpoint was loaded."""
        assert self.handle is not None
        warn_if_late(self.handle, trainer.global_step)
        self._becomes_sparse()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        """See when the weights become sparse: only such models compete for the best."""
        self._has_batches = True
        if self._becomes_sparse():
            for each in _callbacks(trainer):
                forget_best(each)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating(True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating(False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the recipe; without a batch the module stays as it is. Raises RunError as
        :meth:`nmrun.Handle.finalize`."""
        if self.handle is None:
            return
        # a finished training, loaded again, has steps and no batches
        if self._has_batches or self.handle.recipe.step:
            end(self.handle)
        else:
            self.handle.abandon()


def _has_no_steps(trainer: Trainer) -> bool:
    """Whether a Trainer will make none, as in a script that is tried out or after its last epoch."""
    if trainer.ckpt_path is not None:  # what is left is known when it was loaded
        return 0 in (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches)
    trainer.fit_loop.setup_data()
    return trainer.fit_loop.skip


def _callbacks(trainer: Trainer) -> list[Callback]:
    every: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return every


def planned_steps(trainer: Trainer, module: LightningModule) -> int | None:
    """The steps that a Trainer, with its loops, plans for its optimizer; None where it does not
    know, as for one of several, or with a ``GradientAccumulationScheduler``."""
    if not module.automatic_optimization:
        counted = trainer.max_steps > 0 and len(trainer.optimizers) == 1
        return trainer.max_steps if counted else None
    steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs or 0
    for each in _callbacks(trainer):
        # Lightning takes the batches of a step to be as many in all epochs as before the first
        if isinstance(each, callbacks.GradientAccumulationScheduler) and epochs > 0:
            return None
        # its last epoch, for batch norm, has no steps
        averaged = getattr(each, "_max_epochs", epochs)
        if isinstance(each, callbacks.StochasticWeightAveraging) and 0 < averaged < epochs:
            steps = steps * averaged / epochs
    return int(steps) if 0 < steps < float("inf") else None  # -1 where the data have no length


def is_sparse_training(checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint, read from one file, is of a training with a recipe."""
    states = checkpoint.get("optimizer_states", [])
    return any(saved_settings(state["param_groups"]) for state in states)


def load_with_room(strategy: Any, handle: Handle, start: Callable[[int], Handle]) -> None:
    """Let a strategy that loads a checkpoint once the weights are sparse (FSDP2) load what a sparse
    phase has saved, into a training that begins with a dense one. After a checkpoint of a dense
    training ``start(steps)`` begins the recipe anew, with the steps that are left."""
    kind = type(strategy)
    if not strategy.restore_checkpoint_after_setup:
        return

    def load(path: Any, *arguments: Any, **options: Any) -> Any:
        if (Path(path) / ".metadata").is_file():
            metadata = FileSystemReader(path).read_metadata()
            handle.make_room(metadata)
            resumes = any(f".{KEY}." in key for key in metadata.state_dict_metadata)
        else:
            kinds = options.get("weights_only")
            saved = torch.load(path, mmap=True, map_location="cpu", weights_only=kinds)
            resumes = is_sparse_training(saved)
        begins = bool(handle.sparse) and not resumes  # validation loads after the end
        if begins:  # torch takes the clock that the optimizer has for a loaded one, or misses it
            handle.abandon()
        checkpoint = kind.load_checkpoint(strategy, path, *arguments, **options)
        if begins:
            start(checkpoint["global_step"])
        return checkpoint

    strategy.load_checkpoint = load


def average_dense(swa: callbacks.StochasticWeightAveraging, handle: Handle) -> None:
    """Let an averaging callback average dense weights, and project their average."""
    kind = type(swa)

    def update(*arguments: Any) -> None:
        with handle.dense_weights():
            kind.update_parameters(*arguments)

    def transfer(average: LightningModule, module: LightningModule) -> None:
        # the training is over, though batch norm has an epoch more, at whose end Lightning steps
        # with the gradients that are left
        handle.finalize(average)
        handle.finalize()
        kind.transfer_weights(average, module)
        module.zero_grad()

    vars(swa).update(update_parameters=update, transfer_weights=transfer)


def forget_best(callback: Callback) -> None:
    """Let a callback that compares models by a metric begin anew; other callbacks stay."""
    if isinstance(callback, callbacks.ModelCheckpoint) and callback.monitor is not None:
        callback.best_k_models, callback.best_model_score = {}, None
        callback.best_model_path = callback.kth_best_model_path = ""
    if isinstance(callback, callbacks.EarlyStopping):
        worst = torch.tensor(float("inf"))
        callback.best_score = worst if callback.monitor_op == torch.lt else -worst
