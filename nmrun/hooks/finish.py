"""Whether a training may end: every weight holds its pattern, and the optimizer trained it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from nmrun.errors import ConfigError, RunError
from nmrun.recipes.base import Recipe
from nmrun.sparsity.weight import SparseWeight


def check_finished(recipe: Recipe, weights: Sequence[SparseWeight], differs: str) -> None:
    """Check that the weights can stay as they are.

    Args:
        recipe: the recipe, with its clock.
        weights: the sparse weights.
        differs: the name of a weight that is not the projection of its dense weight, or an empty
            string.

    Raises:
        RunError: with the reason: a parameter was replaced, the optimizer never stepped, training
            ended in a dense phase, or a weight was changed or does not hold its pattern.
    """
    replaced = [w for w in weights if _is_replaced(w)]
    if replaced:
        raise RunError(
            f"{replaced[0].name} is another parameter now than the one that was made sparse "
            "(load_state_dict(assign=True), to_empty or fully_shard after sparsify?): make the "
            "optimizer and call sparsify after that"
        )
    if recipe.step == 0:
        raise RunError(
            "the optimizer that was given to sparsify never stepped: give sparsify the optimizer "
            "that trains, or train before finalize()"
        )
    if recipe.dense_forward and not recipe.ends_dense:
        raise RunError(
            f"training ended in a dense phase of {recipe.name}, after step {recipe.step} of "
            f"total_steps={recipe.total_steps}: the weights are not {recipe.pattern}. Train on, or "
            "give sparsify the number of steps that are made"
        )
    if differs:
        raise RunError(
            f"{differs} was changed without the optimizer that was given to sparsify: step with "
            "that one, or call handle.refresh() to return to its weights"
        )
    for weight in weights:
        if not recipe.ends_dense and not weight.holds():
            raise RunError(f"{weight.name} is not {weight.pattern} after step {recipe.step}")


def _is_replaced(weight: SparseWeight) -> bool:
    now = getattr(weight.module, weight.attribute, None)
    if weight.is_sharded and not hasattr(now, "_local_tensor"):
        return False  # fully_shard shows the gathered weight after a forward pass
    return now is not weight.parameter


def counterpart(model: nn.Module, name: str) -> nn.Parameter:
    """Find a parameter in a copy of the model, also inside wrappers (EMA, DDP, compiled).

    Args:
        model: the copy.
        name: the parameter's name in the model that was made sparse.

    Returns:
        The copy's parameter.

    Raises:
        ConfigError: where the copy has no such parameter.
    """
    parameters = dict(model.named_parameters())
    for found in (name, f"module.{name}", f"_orig_mod.{name}", f"module._orig_mod.{name}"):
        if found in parameters:
            return parameters[found]
    raise ConfigError(f"this model has no parameter {name}: finalize takes a copy of the model")
