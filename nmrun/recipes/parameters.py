"""Parameters that a recipe adds to the optimizer (scores of masks, adapters, scales), and weights
that it freezes meanwhile.
"""

from __future__ import annotations

import itertools
import json
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
from nmrun.sparsity.layers import plain_name
from nmrun.sparsity.reference import by_group, from_groups
from nmrun.sparsity.weight import SparseWeight

# keys that say something of one group alone, or of the whole training
OF_ONE_GROUP = ("params", "param_names", "initial_lr", "nmrun")


class AddedParameters(Recipe):
    """A recipe with parameters of its own, which the optimizer moves by gradients that the recipe
    computes.

    In a step they are a parameter group, with the settings that the first group has then. Between
    steps the optimizer has the groups that it was made with, as schedules and other loops expect.
    Their values and moments then lie beside the tensors of their weight, and are saved with these.
    """

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        # of each parameter, by weight and name, what the optimizer counts by
        self.numbers: dict[tuple[str, str], dict[str, Any]] = {}

    @property
    def looks_across_rows(self) -> bool:
        return True  # they are no part of the model, whose parameters are sharded

    def add(
        self,
        weights: Sequence[SparseWeight],
        optimizer: torch.optim.Optimizer,
        first: Callable[[SparseWeight], Mapping[str, Tensor]],
        lr_mult: float = 1.0,
        **options: Any,
    ) -> None:
        """Give every weight the parameters that ``first(weight)`` makes, by name. ``lr_mult``: their
        learning rate, over that of the first parameter group; ``options``: what else differs from
        that group. Raises ConfigError where nobody can say what the optimizer would do with them."""
        self.owners = {weight.name: weight for weight in weights}
        self.parameters = {
            (weight.name, key): nn.Parameter(value)
            for weight in weights
            for key, value in first(weight).items()
        }
        for (name, key), parameter in self.parameters.items():
            self.owners[name][key] = parameter.detach()
        self.lr_mult, self.options = lr_mult, options
        check_optimizer(optimizer, self.name, list(self.parameters.values()))
        group = self._settings(optimizer)
        if "param_names" in optimizer.param_groups[0]:  # torch names all parameters or none
            group["params"] = [(".".join(key), p) for key, p in self.parameters.items()]
        optimizer.add_param_group(group)  # a class may check or complete it
        self.group = optimizer.param_groups.pop()

    def _settings(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        first = {k: v for k, v in optimizer.param_groups[0].items() if k not in OF_ONE_GROUP}
        group = {**first, **self.options, "params": list(self.parameters.values())}
        if self.lr_mult != 1:
            group["lr"] = first["lr"] * self.lr_mult
        return group

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer these parameters for a step, without gradients: a loop clears those of
        the model alone, and the parameters of a layer without a gradient would move on."""
        self.clean(optimizer)  # after a step that failed
        self.group.update(self._settings(optimizer))
        optimizer.param_groups.append(self.group)
        for (name, key), parameter in self.parameters.items():
            weight, prefix = self.owners[name], f"{key}/"
            parameter = self.parameter(weight, key)
            parameter.grad = None
            tensors = {k: weight[k] for k in weight.saved() if k.startswith(prefix)}
            state = {k.removeprefix(prefix): tensor for k, tensor in tensors.items()}
            if state := {**state, **self.numbers.get((name, key), {})}:
                optimizer.state[parameter] = state

    def part(self, optimizer: torch.optim.Optimizer) -> None:
        """Take these parameters out of the optimizer after a step, and keep what it knows of them."""
        for (name, key), parameter in self.parameters.items():
            state = optimizer.state.get(parameter, {})
            moments = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
            for field, tensor in moments.items():
                self.owners[name][f"{key}/{field}"] = tensor
            self.numbers[name, key] = {k: v for k, v in state.items() if k not in moments}
        self.clean(optimizer)

    def clean(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        groups[:] = [group for group in groups if group is not self.group]
        for parameter in self.parameters.values():
            optimizer.state.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        for (name, key), values in self.numbers.items():
            plain = {k: _as_plain(value) for k, value in values.items()}
            numbers.setdefault(plain_name(name), {})[key] = plain
        # one text: torch.distributed.checkpoint loads only keys that are there already
        return {**super().state_dict(), "numbers": json.dumps(numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        numbers = json.loads(state["numbers"])
        self.numbers = {
            (name, key): {k: self._number(value) for k, value in values.items()}
            for name in self.owners
            for key, values in numbers.get(plain_name(name), {}).items()
        }

    def _number(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind, number = value["dtype"], value["value"]
        on_device = self.group.get("capturable") or self.group.get("fused")
        device = next(iter(self.parameters.values())).device if on_device else "cpu"
        return torch.tensor(number, dtype=getattr(torch, kind), device=device)

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


def _as_plain(value: Any) -> Any:
    """A number that an optimizer counts by; of a tensor, its dtype and value."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    return value


def check_optimizer(
    optimizer: torch.optim.Optimizer, recipe: str, added: Sequence[Tensor] = ()
) -> None:
    """Raise ConfigError for an optimizer that may move parameters without a gradient, as torch's do
    not, and for one that cannot move those that are ``added``."""
    first, *others = optimizer.param_groups
    differing = [
        key
        for key, value in first.items()  # such as use_muon; names and factors may differ
        if key not in optimizer.defaults and key not in OF_ONE_GROUP and isinstance(value, bool)
        if not all(key in group and group[key] == value for group in others)
    ]
    muon = isinstance(optimizer, getattr(torch.optim, "Muon", ()))
    why = ""
    # One without a default learning rate reads keys of its own from each group. Such optimizers
    # (nanochat's, Muon's with an Adam beside it) take missing gradients for 0 or do not expect them.
    if "lr" not in optimizer.defaults:
        why = "has a learning rate for each of its groups only"
    elif added and differing:
        why = f"has groups that differ in {differing[0]}"
    elif muon and any(parameter.dim() != 2 for parameter in added):
        why = "moves matrices alone"
    elif added and isinstance(optimizer, torch.optim.Adagrad):
        why = "makes its state in its constructor alone"
    if why:
        raise ConfigError(
            f"{recipe} freezes weights or adds parameters, and {type(optimizer).__name__} {why}: use "
            "another optimizer for the sparse weights, such as AdamW"
        )


# candidates a group; beyond, their scores outweigh the weights many times over (4:16 has 1,820)
MOST_CANDIDATES = 256


@cache
def _rows(pattern: Pattern) -> Tensor:
    rows = torch.zeros(math.comb(pattern.m, pattern.n), pattern.m, device="cpu")
    for row, members in zip(rows, itertools.combinations(range(pattern.m), pattern.n), strict=True):
        row[list(members)] = 1.0
    return rows


def candidates(pattern: Pattern, like: Tensor) -> Tensor:
    """All masks of a group: ones and zeros (C, M), C = M over N, in the order of
    ``itertools.combinations``, with the dtype and device of ``like``."""
    return _rows(pattern).to(like.device, like.dtype)


@dataclass
class MaskScores(AddedParameters):
    """A score for every possible mask of a group: parameters (groups, C), C = (M over N)."""

    def refuses(self, shape: Sequence[int], outputs: int, pattern: Pattern) -> str:
        count = math.comb(pattern.m, pattern.n)
        if count <= MOST_CANDIDATES:
            return ""
        return f"{pattern} has {count:,} possible masks a group, and {MOST_CANDIDATES} at most have scores"

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
