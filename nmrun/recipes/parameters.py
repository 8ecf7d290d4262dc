"""Parameters that a recipe adds to the optimizer (scores of masks, adapters, scales), and weights
that it freezes meanwhile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity.reference import by_group, from_groups
from nmrun.sparsity.weight import SparseWeight

# keys of a group that are not the optimizer's own: torch's, its schedules', nmrun's
COMMON = ("params", "param_names", "initial_lr", "nmrun")


class AddedParameters(Recipe):
    """A recipe with parameters of its own. They have a parameter group to themselves, and the
    optimizer moves them by gradients that the recipe computes.

    The recipe's tensors of each weight share their memory, so that they are saved with the
    optimizer.
    """

    @property
    def looks_across_rows(self) -> bool:
        return True  # they are no part of the model, whose parameters are sharded

    def add(
        self,
        weights: Sequence[SparseWeight],
        optimizer: torch.optim.Optimizer,
        first: Callable[[SparseWeight], Mapping[str, Tensor]],
        **options: Any,
    ) -> None:
        """Give every weight the parameters that ``first(weight)`` makes, by name. ``options``:
        those of the parameter group; others are the optimizer's defaults. Raises ConfigError
        where nobody can say what the optimizer would do with such a group."""
        common = _common_keys(optimizer, self.name)
        made = {
            (weight.name, key): nn.Parameter(value)
            for weight in weights
            for key, value in first(weight).items()
        }
        params: list[Any] = list(made.values())
        copied = _copied_group(optimizer, params)
        for own, parameter in zip(copied, params, strict=False):
            own.data = parameter.data
        self.parameters = dict(zip(made, copied or params, strict=True))
        by_name = {weight.name: weight for weight in weights}
        for (name, key), parameter in self.parameters.items():
            by_name[name][key] = parameter.detach()
        if copied:
            return
        if isinstance(optimizer, getattr(torch.optim, "Muon", ())) and any(
            parameter.dim() != 2 for parameter in params
        ):
            raise ConfigError(
                f"{self.name} adds parameters that are no matrices, and Muon moves matrices alone: "
                "use another optimizer for the sparse weights, such as AdamW"
            )
        if isinstance(optimizer, torch.optim.Adagrad):
            raise ConfigError(
                f"{self.name} adds parameters, and Adagrad makes state for those alone that it is "
                "constructed with: use another optimizer, such as AdamW or SGD"
            )
        if "param_names" in optimizer.param_groups[0]:  # torch names all parameters or none
            params = [(".".join(key), p) for key, p in made.items()]
        optimizer.add_param_group({**common, "params": params, **options})

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        added = {id(parameter) for parameter in self.parameters.values()}
        optimizer.param_groups[:] = [
            group for group in optimizer.param_groups if added.isdisjoint(map(id, group["params"]))
        ]
        for parameter in self.parameters.values():
            optimizer.state.pop(parameter, None)

    def clear_gradients(self) -> None:
        """Drop the gradients of the last step. A loop that clears those of the model leaves these, and
        the parameters of a layer without a gradient would move on by them."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def parameter(self, weight: SparseWeight, key: str) -> nn.Parameter:
        """A parameter of a weight; saved values that were loaded count. Raises ConfigError where the
        weight was cast, of which its own parameters know nothing."""
        parameter = self.parameters[weight.name, key]
        if parameter.dtype != weight.parameter.dtype:  # an average may have another one
            raise ConfigError(
                f"{weight.name} was cast, and not what {self.name} has added for it: cast the model "
                "before sparsify"
            )
        if weight[key].data_ptr() != parameter.data_ptr():
            parameter.data.copy_(weight[key])
            weight[key] = parameter.detach()
        return parameter


def check_groups(optimizer: torch.optim.Optimizer, recipe: str) -> None:
    """Raise ConfigError for an optimizer that may move parameters without a gradient, as torch's do
    not. One without a learning rate by default reads keys of its own from each group. Such
    optimizers (nanochat's, Muon's with an Adam beside it) take missing gradients for 0 or do not
    expect them."""
    if "lr" not in optimizer.defaults:
        raise ConfigError(
            f"{recipe} freezes weights or adds parameters, and {type(optimizer).__name__} has a "
            "learning rate for each of its groups only: use one such as AdamW or SGD"
        )


def _common_keys(optimizer: torch.optim.Optimizer, recipe: str) -> dict[str, Any]:
    """What all groups of an optimizer say besides its defaults."""
    check_groups(optimizer, recipe)
    first, *others = optimizer.param_groups
    common = {}
    for key, value in first.items():
        if key in optimizer.defaults or key in COMMON:
            continue
        if all(key in group and _is_same(group[key], value) for group in others):
            common[key] = value
        elif isinstance(value, bool):  # such as use_muon; names and factors may differ
            raise ConfigError(
                f"{recipe} adds a parameter group, and those of {type(optimizer).__name__} differ "
                f"in {key}: use an optimizer that moves all parameters alike, such as AdamW"
            )
    return common


def _copied_group(optimizer: torch.optim.Optimizer, made: Sequence[Tensor]) -> list[nn.Parameter]:
    """The added parameters that an optimizer which was copied in training still has, with their
    moments, known by their shapes; none in any other optimizer."""
    if not isinstance(optimizer.param_groups[0].get("nmrun"), dict):  # the copied clock
        return []
    shapes = [parameter.shape for parameter in made]
    groups = (list(group["params"]) for group in optimizer.param_groups[1:])
    return next((group for group in groups if [p.shape for p in group] == shapes), [])


def _is_same(value: Any, other: Any) -> bool:
    plain = (bool, int, float, str, tuple, type(None))
    return value is other or (
        isinstance(value, plain) and type(value) is type(other) and value == other
    )


# candidates a group; beyond, their scores outweigh the weights many times over (4:16 has 1,820)
MOST_CANDIDATES = 256


@cache
def _rows(pattern: Pattern) -> Tensor:
    rows = torch.zeros(math.comb(pattern.m, pattern.n), pattern.m)
    for row, members in zip(rows, itertools.combinations(range(pattern.m), pattern.n), strict=True):
        row[list(members)] = 1.0
    return rows


def candidates(pattern: Pattern, like: Tensor) -> Tensor:
    """All masks of a group: ones and zeros (C, M), C = M over N, in the order of
    ``itertools.combinations``, with the dtype and device of ``like``."""
    return _rows(pattern).to(like.device, like.dtype)


def too_many(pattern: Pattern) -> str:
    """Why a pattern has too many candidates, or an empty string."""
    count = math.comb(pattern.m, pattern.n)
    return (
        f"{pattern} has {count:,} possible masks a group, more than the {MOST_CANDIDATES} that can have a score each"
        if count > MOST_CANDIDATES
        else ""
    )


@dataclass
class MaskScores(AddedParameters):
    """A score for every possible mask of a group: parameters (groups, C), C = (M over N)."""

    def refuses(self, shape: Sequence[int], outputs: int, pattern: Pattern) -> str:
        return too_many(pattern)

    def score(
        self,
        weights: Sequence[SparseWeight],
        optimizer: torch.optim.Optimizer,
        first: Callable[[SparseWeight, tuple[int, ...]], Tensor],
        **options: Any,
    ) -> None:
        """Give every weight its scores, ``first(weight, shape)``; else as :meth:`add`."""

        def scores_of(weight: SparseWeight) -> dict[str, Tensor]:
            groups = by_group(weight.dense, weight.pattern, weight.dim).shape[:-1]
            count = len(candidates(weight.pattern, weight.dense))
            return {"scores": first(weight, (*groups, count))}

        self.add(weights, optimizer, scores_of, **options)

    def scores(self, weight: SparseWeight) -> nn.Parameter:
        return self.parameter(weight, "scores")

    @staticmethod
    def mask(weight: SparseWeight, rows: Tensor) -> Tensor:
        """The mask of a weight from one row of M for each group."""
        return from_groups(rows, weight.dense.shape, weight.dim)

    def keep(self, weight: SparseWeight, out: Tensor, numbers: Tensor) -> None:
        """Write the weight under one candidate for each group, by its number."""
        rows = candidates(weight.pattern, weight.dense)[numbers]
        torch.mul(weight.dense, self.mask(weight, rows), out=out)

    @staticmethod
    def of_candidates(weight: SparseWeight, of_weights: Tensor) -> Tensor:
        """For every candidate the sum of a quantity over the weights it keeps, (groups, C)."""
        members = by_group(of_weights, weight.pattern, weight.dim)
        return members @ candidates(weight.pattern, members).T


class FrozenWeights(Recipe):
    """Dense training in the fraction ``dense`` of the steps, then masks alone are learned, until
    the last step.

    The forward pass is N:M from the last step on. Between the two a final weight is what the masks
    would leave now.
    """

    dense: float

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        assert total_steps is not None
        self.begins, self.ends = round(self.dense * total_steps), total_steps
        self.dense_forward, self.dense_steps = True, total_steps
        self.frozen: list[nn.Parameter] = []  # in the present step

    @property
    def is_sparse(self) -> bool:
        return self.step >= self.ends

    @property
    def evaluates_final(self) -> bool:
        return not self.dense_forward and not self.is_sparse

    def freeze(self, optimizer: torch.optim.Optimizer, but: Iterable[nn.Parameter] = ()) -> None:
        """Take the gradients of all parameters ``but`` some away, so that the optimizer passes over
        them."""
        moved = {id(parameter) for parameter in but}
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        self.frozen = [p for p in owned if id(p) not in moved]
        for parameter in self.frozen:
            parameter.grad = None

    def check_frozen(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RunError where an optimizer took the missing gradients of :meth:`freeze` for 0, as
        some Muons do: momentum and weight decay then move frozen weights."""
        frozen, self.frozen = self.frozen, []
        if any(parameter.grad is not None for parameter in frozen):
            raise RunError(
                f"{self.name} freezes weights, and {type(optimizer).__name__} moves those without "
                "a gradient too: use another optimizer, such as AdamW or SGD"
            )
