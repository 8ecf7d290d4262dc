"""What every stack's callback does: check what was asked for, begin, end."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from nmrun import recipes
from nmrun.errors import RunError
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.step.handle import Handle
from nmrun.step.sparsify import sparsify


class Training:
    """A sparse training whose model and optimizer a stack makes later.

    Args:
        recipe, pattern, total_steps: as of :func:`nmrun.sparsify`.
        options: its other arguments, hyperparameters among them.

    Raises:
        ConfigError: for an unknown recipe, pattern or value.
        TypeError: for an unknown hyperparameter.
    """

    def __init__(
        self,
        recipe: str | Recipe,
        pattern: str | Pattern,
        total_steps: int | None,
        options: dict[str, Any],
    ) -> None:
        self.pattern, self.recipe = Pattern.parse(pattern), recipe
        self.total_steps, self.options = total_steps, options
        own = inspect.signature(sparsify).parameters
        recipes.build(recipe, {k: v for k, v in options.items() if k not in own})

    def begin(self, model: nn.Module, optimizer: Any, total_steps: int | None) -> Handle:
        """Make the weights sparse, as :func:`nmrun.sparsify` does.

        Args:
            model, optimizer: those that train.
            total_steps: what the stack knows of it, where nothing else was asked for.
        """
        total = self.total_steps or total_steps
        return sparsify(model, optimizer, self.recipe, self.pattern, total, **self.options)


@torch.no_grad()
def end(handle: Handle) -> None:
    """End the recipe. N:M weights that the stack has loaded since the last step stay: those of the
    best checkpoint, or an average.

    Args:
        handle: of the training.

    Raises:
        RunError: where loaded weights are not N:M, and as :meth:`nmrun.Handle.finalize`.
    """
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
