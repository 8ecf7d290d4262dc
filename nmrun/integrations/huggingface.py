"""The Trainer of Hugging Face's transformers: ``Trainer(..., callbacks=[NMCallback("step")])``."""

from __future__ import annotations

from typing import Any

from torch import nn

from nmrun.errors import RunError
from nmrun.integrations.training import Training, end
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.step.handle import Handle

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError:
    raise ImportError(
        "nmrun.integrations.huggingface needs transformers: pip install 'nmrun[huggingface]'"
    ) from None


class NMCallback(TrainerCallback):
    """Lets the Trainer train with N:M sparse weights. ::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[NMCallback("sr_ste", "2:4")])
        trainer.train()

    Checkpoints are plain, and ``resume_from_checkpoint`` resumes with the same bits. With
    ``load_best_model_at_end``, only models from sparse phases compete for the best.

    Args:
        recipe, pattern: as of :func:`nmrun.sparsify`.
        total_steps: optimizer steps of the whole run; by default as the Trainer plans.
        options: other arguments of :func:`nmrun.sparsify`, the recipe's hyperparameters among them.

    Attributes:
        handle: the handle, from the beginning of the training on.

    Raises:
        ConfigError: for an unknown recipe, pattern or value.
        TypeError: for an unknown hyperparameter.
    """

    def __init__(
        self,
        recipe: str | Recipe = "sr_ste",
        pattern: str | Pattern = "2:4",
        total_steps: int | None = None,
        **options: Any,
    ) -> None:
        self.handle: Handle | None = None
        self._training = Training(recipe, pattern, total_steps, options)
        self._step, self._was_sparse = 0, True

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make the weights sparse. A checkpoint was loaded before."""
        assert model is not None
        self.handle = self._training.begin(model, optimizer, state.max_steps)
        self._step, self._was_sparse = self.handle.recipe.step, self.handle.is_sparse

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See that the optimizer of the beginning has stepped, and when weights become sparse.

        Raises:
            RunError: where another optimizer moves the weights.
        """
        assert self.handle is not None
        step = self.handle.recipe.step
        if step == self._step and any(weight.moved() for weight in self.handle.sparse):
            raise RunError(
                "another optimizer than the Trainer's of on_train_begin moves the weights: give "
                "it to the Trainer by optimizers=(optimizer, scheduler)"
            )
        if self.handle.is_sparse and not self._was_sparse:
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        self._step, self._was_sparse = step, self.handle.is_sparse

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the recipe; the weights of the best model, if the Trainer has loaded it, stay.

        Raises:
            RunError: as :meth:`nmrun.Handle.finalize`, and where the best model is not N:M.
        """
        assert self.handle is not None
        end(self.handle)
