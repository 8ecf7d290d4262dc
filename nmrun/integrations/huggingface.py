"""The Trainer of Hugging Face's transformers: ``Trainer(..., callbacks=[NMTrainerCallback("step")])``."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nmrun.errors import ConfigError, RunError
from nmrun.integrations.training import Training, end, warn_if_late
from nmrun.step.resume import has_state, saved_settings
from nmrun.step.sparsify import unwrapped


class NMTrainerCallback(Training, TrainerCallback):
    """Lets the Trainer train with N:M sparse weights. ::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[NMTrainerCallback("sr_ste", "2:4")])
        trainer.train()

    Checkpoints are plain, and ``resume_from_checkpoint`` resumes with the same bits. With
    ``load_best_model_at_end``, only models from sparse phases compete for the best. The recipe's
    events are in the Trainer's log (``trainer.state.log_history``), under ``nmrun``. ``handle`` is
    there from the beginning of the training on. The evaluations of the training are by
    :meth:`nmrun.Handle.evaluation_weights`.

    Args:
        total_steps: optimizer steps of the whole run; by default as the Trainer plans.
        options: other arguments of :func:`nmrun.sparsify`. Recipe, pattern and hyperparameters are
            checked here, the rest when the training begins.
    """

    _step = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make the weights sparse; a checkpoint was loaded before. Raises ConfigError as
        :func:`nmrun.sparsify`, and for a checkpoint of shards or without the optimizer's state."""
        assert model is not None
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)  # in accelerate's wrapper
        # plain SGD never has any state; the schedule is saved and loaded with the optimizer
        loaded = has_state(unwrapped(optimizer)) or getattr(schedule, "last_epoch", False)
        resumes = saved_settings(unwrapped(optimizer).param_groups) is not None
        made = 0 if resumes else state.global_step
        handle = self._begin(model, optimizer, state.max_steps, state.global_step > 0, made)
        # of shards, accelerate has loaded what the optimizer had keys for then: none of nmrun's
        sharded = any(weight.is_sharded for weight in handle.sparse)
        if state.global_step and (sharded or not loaded) and not handle.recipe.step:
            handle.abandon()
            why = (
                "is in shards (FSDP), of which the Trainer loads what every optimizer has"
                if loaded
                else "has no state of the optimizer (save_only_model)"
            )
            raise ConfigError(
                f"the checkpoint of step {state.global_step} {why}, so no dense weights and no "
                "clock of the recipe: begin a new training with its model"
            )
        self._evaluating(args.eval_on_start)
        warn_if_late(handle, state.global_step)
        self._log_events(state)
        self._becomes_sparse()
        self._step = handle.recipe.step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Train on after an evaluation, of one data set or several."""
        self._evaluating(False)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluating(control.should_evaluate)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See when weights become sparse. Raises RunError where another optimizer than the first
        moves them."""
        assert self.handle is not None
        step = self.handle.recipe.step
        if step == self._step and any(weight.moved() for weight in self.handle.sparse):
            raise RunError(
                "another optimizer than the Trainer's first one moves the weights: give "
                "it to the Trainer by optimizers=(optimizer, scheduler)"
            )
        if self._becomes_sparse():
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        self._step = step
        self._evaluating(control.should_evaluate)
        self._log_events(state)

    def _log_events(self, state: TrainerState) -> None:
        assert self.handle is not None
        for event in self.handle.pop_events():
            state.log_history.append(
                {"nmrun": str(event), "epoch": state.epoch, "step": state.global_step}  # type: ignore[dict-item]
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the recipe; the weights of the best model, if the Trainer has loaded it, stay. A trial
        that a search for hyperparameters has pruned is left without an end. Raises RunError as
        :meth:`nmrun.Handle.finalize`, and where the best model is not N:M."""
        assert self.handle is not None
        self._evaluating(False)
        if state.is_hyper_param_search and not control.should_training_stop:
            self.handle.abandon()
        else:
            end(self.handle)
