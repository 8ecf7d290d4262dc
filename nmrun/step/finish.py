"""Whether a training may end: every weight holds its pattern, and the optimizer trained it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError
from nmrun.recipes.base import Recipe
from nmrun.sparsity.weight import SparseWeight
from nmrun.step.resume import WRAPPED

Average = nn.Module | Iterable[Tensor]  # a copy of the model, or its parameters in their order


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


def counterparts(average: Average, model: nn.Module, names: Sequence[str]) -> list[Tensor]:
    """Find parameters in a copy of the model, also inside wrappers (EMA, DDP, compiled).

    Args:
        average: the copy, or the list of its parameters.
        model: the model that was made sparse.
        names: the names of the parameters there.

    Returns:
        The copy's parameters.

    Raises:
        ConfigError: where the copy has no such parameter.
    """
    parameters: dict[str, Tensor]
    if isinstance(average, nn.Module):
        parameters = {_plain(name): p for name, p in average.named_parameters()}
    elif isinstance(average, Iterable) and not isinstance(average, Tensor | Mapping):
        parameters = _by_position(list(average), model)
    else:
        raise ConfigError(
            f"{type(average).__name__} is neither a copy of the model nor a list of its parameters "
            "(an EMA has one of the two, as module or shadow_params): give that"
        )
    for name in map(_plain, names):
        if name not in parameters:
            raise ConfigError(
                f"this model has no parameter {name}: it takes a copy of the model that was made sparse"
            )
    return [parameters[_plain(name)] for name in names]


def _plain(name: str) -> str:
    """The name of a parameter without the parts that wrappers add."""
    return re.sub(WRAPPED, "", name)


def _by_position(average: list[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Name a list of parameters: of all that the model has, or of those that are trained."""
    every = list(model.named_parameters())
    trained = [(name, p) for name, p in every if p.requires_grad]
    for named in (every, trained):
        if [tuple(p.shape) for _, p in named] == [tuple(p.shape) for p in average]:
            return {_plain(name): p for (name, _), p in zip(named, average, strict=True)}
    raise ConfigError(
        f"this list of {len(average)} tensors has not the shapes of the model's {len(every)} "
        "parameters: it takes them all, in the order of model.parameters()"
    )
