"""What every stack's callback does: check what was asked for, begin, end."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nmrun import recipes
from nmrun.errors import ConfigError, RunError
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.recipes.parameters import AddedParameters
from nmrun.step.handle import Handle
from nmrun.step.sparsify import sparsify, unwrapped


class Training:
    """A sparse training whose model and optimizer a stack makes later.

    ``own_optimizer``: how the stack is given an optimizer of nmrun's. Raises ConfigError for an
    unknown recipe, pattern or value, TypeError for an unknown hyperparameter.
    """

    def __init__(
        self,
        recipe: str | Recipe,
        pattern: str | Pattern,
        total_steps: int | None,
        options: dict[str, Any],
        own_optimizer: str,
    ) -> None:
        self.handle: Handle | None = None
        self.own_optimizer = own_optimizer
        self.pattern, self.recipe = Pattern.parse(pattern), recipe
        self.total_steps, self.options = total_steps, options
        arguments = inspect.signature(sparsify).parameters
        built = recipes.build(recipe, {k: v for k, v in options.items() if k not in arguments})
        self._name, self._adds_group = built.name, isinstance(built, AddedParameters)

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        total_steps: int | None,
        resumed: int = 0,
        schedules: Sequence[Any] = (),
    ) -> Handle:
        """Make the weights sparse, as :func:`nmrun.sparsify` does. A training of the same model
        that was cut off in this process is left first. Where its own optimizer has loaded the
        checkpoint of step ``resumed`` since, it goes on. Raises ConfigError as
        :func:`nmrun.sparsify`, and for a recipe that adds a parameter group where a schedule has
        a function for each group."""
        if self._adds_group and any(hasattr(each, "lr_lambdas") for each in schedules):
            raise ConfigError(
                f"{self._name} adds a parameter group, for which an older LambdaLR has no function: "
                "use another schedule, such as CosineAnnealingLR, or a loop of your own"
            )
        last = self.handle
        if last is not None and last.sparse and last.model is model:
            if last.optimizer is unwrapped(optimizer) and last.recipe.step == resumed > 0:
                return last
            last.abandon()
        total = self.total_steps or total_steps
        try:
            self.handle = sparsify(
                model, optimizer, self.recipe, self.pattern, total, **self.options
            )
        except ValueError as error:
            if "nmrun.optim." in str(error):
                raise ConfigError(f"{error}: {self.own_optimizer}") from None
            raise
        return self.handle


@torch.no_grad()
def end(handle: Handle) -> None:
    """End the recipe. N:M weights that the stack has loaded since the last step stay: those of the
    best checkpoint, or an average. Raises RunError where they are not N:M, and as
    :meth:`nmrun.Handle.finalize`."""
    loaded = [(w, w.parameter.detach().clone()) for w in handle.sparse if w.moved()]
    for weight, _ in loaded:
        if not (weight.holds() or handle.recipe.ends_dense):
            raise RunError(
                f"{weight.name} was loaded at the end of the training, and is not "
                f"{weight.pattern}: it was saved before the weights were sparse"
            )
    handle.refresh()
    handle.finalize()
    for weight, values in loaded:
        weight.parameter.copy_(values)
