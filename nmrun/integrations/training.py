"""What every stack's callback does: check what was asked for, begin, end."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import Any

import torch
from torch import nn

from nmrun import recipes
from nmrun.errors import RunError
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.step.handle import Handle
from nmrun.step.sparsify import sparsify, unwrapped

BEGUN: weakref.WeakSet[Handle] = weakref.WeakSet()  # by all callbacks of this process


class Training:
    """A sparse training whose model and optimizer a stack makes later; a stack's callback is one.

    Raises ConfigError for an unknown recipe, pattern or value, TypeError for
    an unknown hyperparameter.
    """

    def __init__(
        self,
        recipe: str | Recipe = "sr_ste",
        pattern: str | Pattern = "2:4",
        total_steps: int | None = None,
        **options: Any,
    ) -> None:
        self.handle: Handle | None = None
        self._asked = recipe, Pattern.parse(pattern)
        self._total_steps, self._options = total_steps, options
        self._evaluation, self._was_sparse = contextlib.ExitStack(), True
        arguments = inspect.signature(sparsify).parameters
        hyperparameters = {k: v for k, v in options.items() if k not in arguments}
        recipes.build(recipe, hyperparameters, arguments)

    def _begin(
        self,
        model: nn.Module,
        optimizer: Any,
        total_steps: int | None,
        resumed: bool = False,
        made: int = 0,
    ) -> Handle:
        """Make the weights sparse, as :func:`nmrun.sparsify` does; ``made`` of the stack's
        ``total_steps`` are of a dense training before it. A training of these weights that
        was cut off in this process is left first, also that of another callback. Where the stack
        goes on from a checkpoint (``resumed``), which its own optimizer has loaded since, it goes
        on. Raises ConfigError as :func:`nmrun.sparsify`."""
        stepping = unwrapped(optimizer)
        owned = {id(p) for group in stepping.param_groups for p in group["params"]}
        for last in list(BEGUN):
            own, same = last is self.handle, last.optimizer is stepping
            # sparsify refuses two callbacks for one optimizer
            if owned.isdisjoint(id(w.parameter) for w in last.sparse) or (same and not own):
                continue
            # their clocks may differ: a stack counts the steps that a GradScaler skips
            if own and same and resumed and last.stepper.resume.loaded:
                return last
            if not own:
                last.stepper.warn("another training of these weights begins, and this one is left")
            last.abandon()
        total = self._total_steps
        if total is None and total_steps is not None:
            total = max(1, total_steps - made)  # where none are left, the end says so
        self.handle = sparsify(model, optimizer, *self._asked, total, **self._options)
        BEGUN.add(self.handle)
        return self.handle

    def _evaluating(self, now: bool) -> None:
        """From here on let the weights be those to evaluate by, or else those of the training."""
        self._evaluation.close()
        if now and self.handle is not None:
            self._evaluation.enter_context(self.handle.evaluation_weights())

    def _becomes_sparse(self) -> bool:
        """Whether the weights have become sparse since the last call; False of the first one."""
        assert self.handle is not None
        before, self._was_sparse = self._was_sparse, self.handle.is_sparse
        return self._was_sparse and not before


def warn_if_late(handle: Handle, steps: int) -> None:
    """Warn of a recipe that begins when the training has made steps already, as after the
    checkpoint of a dense training. ``dense`` has no steps to begin."""
    if steps and handle.sparse and not handle.recipe.step:
        total = handle.recipe.total_steps
        handle.stepper.warn(
            f"the training is at its step {steps}, and the recipe begins here, with the first of "
            f"{total or 'its'} steps"
        )


@torch.no_grad()
def end(handle: Handle) -> None:
    """End the recipe. N:M weights that the stack has loaded since the last step stay: those of the
    best checkpoint, or an average. Raises RunError where they are not N:M, and as
    :meth:`nmrun.Handle.finalize`."""
    # by their values: a callback that averages writes through .data, which leaves no trace
    sparse = [] if handle.recipe.dense_forward else handle.sparse
    loaded = [(w, w.parameter.detach().clone()) for w in sparse if handle.stepper.differs(w)]
    for weight, _ in loaded:
        if not (weight.holds() or handle.recipe.ends_dense):
            raise RunError(
                f"{weight.name} was loaded at the end of the training, and is not "
                f"{weight.pattern}: it takes weights of a sparse phase, and averages that "
                "handle.finalize(average) has made N:M"
            )
    handle.refresh()
    handle.finalize()
    for weight, values in loaded:
        weight.parameter.copy_(values)
