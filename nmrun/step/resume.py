"""What is saved of a sparse training with the optimizer, and how it is restored.

The recipe's clock lies in ``optimizer.param_groups[0]["nmrun"]`` (plain data), the weights' tensors
in ``optimizer.state[parameter]``. So whoever saves and loads model and optimizer resumes exactly.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from nmrun.errors import ConfigError
from nmrun.kernels.layout import local
from nmrun.optim.stock import EagerOptimizer
from nmrun.recipes.base import Recipe
from nmrun.sparsity.layers import plain_name
from nmrun.sparsity.processes import added, alike
from nmrun.sparsity.weight import LOOKED_FOR, PREFIX, SparseWeight, never_stepped

KEY = "nmrun"
VERSION = 1  # of the form of what is saved


class SettingsEntry:
    """Stands for :func:`settings_of` in the optimizer's parameter groups while it trains. A copy of
    the optimizer (deepcopy, pickle), which calls no hook, has them as they are then. Plain data in its
    place, which changes in every step, would have ``torch.compile`` compile a step once more.
    """

    def __init__(self, recipe: Recipe, weights: Sequence[SparseWeight]) -> None:
        self.recipe, self.weights = recipe, weights

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (settings_of(self.recipe, self.weights),)


class Resume:
    """Adds the recipe's clock and the weights' tensors to the optimizer's state dict, and restores
    both when a state dict is loaded.

    ``refresh`` writes the projections of the dense weights into the parameters.

    Attributes:
        loaded: whether the optimizer has loaded the state of such a training since its last step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        weights: Sequence[SparseWeight],
        refresh: Callable[[], None],
    ) -> None:
        self.optimizer, self.recipe, self.weights = optimizer, recipe, weights
        self.refresh = refresh
        # weights for which the optimizer had no state before the state dict was made
        self._without: list[SparseWeight] = []
        # by weight: its own tensors, which torch would cast to the dtype of the parameter
        self._apart: dict[str, dict[str, torch.Tensor]] = {}
        # by weight and key: the metadata of the tensors that will be loaded
        self._room: dict[str, dict[str, Any]] = {}
        self.loaded = False
        self._entry = SettingsEntry(recipe, weights)
        self._looked_for = next((k for o, k in LOOKED_FOR.items() if isinstance(optimizer, o)), ())

    def make_room(self, metadata: Any) -> None:
        """Give the next state dict the keys of saved files, as ``Handle.make_room`` says."""
        plain = {plain_name(w.name): w.name for w in self.weights}
        for key, saved in metadata.state_dict_metadata.items():
            place, _, last = key.rpartition(".")
            match = re.fullmatch(r"(?:.*\.)?state\.(.*)", place)
            if match and match[1] in plain and hasattr(saved, "properties"):
                self._room.setdefault(plain[match[1]], {})[last] = saved

    def _fill_room(self) -> None:
        """Give the optimizer's state of each weight exactly the keys that will be loaded."""
        for weight in self.weights:
            saved_tensors = self._room.get(weight.name, {})
            state = self.optimizer.state[weight.parameter]
            for key in [key for key in state if saved_tensors and key not in saved_tensors]:
                del state[key]
            for key, metadata in saved_tensors.items():
                kind, like = metadata.properties.dtype, weight.parameter.detach()
                if key not in state and metadata.size == like.shape:
                    state[key] = torch.zeros_like(like, dtype=kind)
                elif key not in state:
                    state[key] = torch.zeros(metadata.size, dtype=kind, device=like.device)

    def hooks(self) -> list[Any]:
        """Register hooks of the optimizer's ``state_dict`` and ``load_state_dict``; returns what
        removes them."""
        return [
            self.optimizer.register_state_dict_pre_hook(self._before_saving),
            self.optimizer.register_state_dict_post_hook(self._after_saving),
            self.optimizer.register_load_state_dict_pre_hook(self._before_loading),
            self.optimizer.register_load_state_dict_post_hook(self._after_loading),
            *self._custom_loading(),
        ]

    def _custom_loading(self) -> list[Any]:
        """Follow a ``load_state_dict`` of the optimizer's own, which may call no hooks, as
        bitsandbytes'."""
        optimizer: Any = self.optimizer
        recipe, weights = self.recipe, self.weights
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            return []
        original = optimizer.load_state_dict

        @functools.wraps(original)
        def load(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            self.loaded = False
            check_settings(saved_settings(state_dict.get("param_groups") or ()), recipe, weights)
            original(state_dict, *args, **kwargs)
            if not self.loaded:  # no hook was called
                self._after_loading(optimizer)

        optimizer.load_state_dict = load
        return [SimpleNamespace(remove=lambda: vars(optimizer).pop("load_state_dict"))]

    def put_clock(self) -> None:
        self.optimizer.param_groups[0][KEY] = self._entry

    def put(self) -> None:
        """Put everything that is saved into the optimizer, so that its copies have it too."""
        self.put_clock()
        for weight in self.weights:
            weight.put_state(self.optimizer)
            if state := self.optimizer.state.get(weight.parameter):
                for key in self._looked_for:
                    state.setdefault(key, torch.zeros(()))

    def _before_saving(self, _: torch.optim.Optimizer) -> None:
        self.recipe.clean(self.optimizer)
        state = self.optimizer.state
        self._without = [w for w in self.weights if not state.get(w.parameter)]
        self.put()
        self.optimizer.param_groups[0][KEY] = settings_of(self.recipe, self.weights)
        if self._room:
            self._fill_room()

    def _after_saving(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Make state dict and optimizer what torch.distributed.checkpoint expects. It initialises
        an optimizer only where that has no state, so one that has not stepped is left without.
        It expects either no entry or one for each parameter; plain SGD has none, and the sparse
        weights alone would have one."""
        # copies, since pop_state empties the optimizer's own entries
        state_dict["state"] = {
            number: dict(state) if isinstance(state, dict) else state
            for number, state in state_dict["state"].items()
        }
        for weight in self._without:
            weight.pop_state(self.optimizer)
        self.put_clock()
        if _of_parameters(state_dict["state"]):
            for group in state_dict["param_groups"]:
                for number in group["params"]:
                    state_dict["state"].setdefault(number, {})

    def _before_loading(
        self, _: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Check what is loaded, and take the weights' own tensors out: torch would cast them, and its
        optimizers take any state that is not empty for their own."""
        check_settings(saved_settings(state_dict["param_groups"]), self.recipe, self.weights)
        parameters = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        names = {id(w.parameter): w.name for w in self.weights}
        states, self._apart = dict(state_dict["state"]), {}
        for parameter, number in zip(
            parameters, numbers, strict=False
        ):  # torch compares their lengths
            state = states.get(number)
            if parameter not in names or not state:
                continue
            own = {key: state[key] for key in state if str(key).startswith(PREFIX)}
            self._apart[names[parameter]] = own
            states[number] = {key: state[key] for key in state if key not in own}
            if never_stepped(state):
                del states[number]
        return {**state_dict, "state": states}

    def _after_loading(self, _: torch.optim.Optimizer) -> None:
        self._room = {}
        apart, self._apart = self._apart, {}
        settings = saved_settings(self.optimizer.param_groups)
        self.loaded = settings is not None
        if settings is None:  # it was saved without nmrun: the recipe stays where it is
            self.put()
            return
        dtypes = dtypes_of(settings)
        for weight in self.weights:
            weight.clear()  # tensors that were not saved must not stay
            weight.pop_state(self.optimizer, dtypes)  # for a load that called no hook
            usual = str(weight.parameter.dtype).removeprefix("torch.")
            for key, value in apart.get(weight.name, {}).items():
                name = key.removeprefix(PREFIX)
                weight.restore(name, value.clone(), dtypes.get(name, usual))
        check_dense(settings, self.weights)
        self.recipe.load_state_dict(settings["state"])
        self.refresh()
        self.put()


def settings_of(recipe: Recipe, weights: Sequence[SparseWeight]) -> dict[str, Any]:
    """The recipe's clock and what a loaded clock is checked against, as plain data."""
    dtypes = {key: dtype for weight in weights for key, dtype in weight.dtypes.items()}
    return {
        "version": VERSION,
        "recipe": recipe.name,
        "pattern": str(recipe.pattern),
        "weights": {plain_name(w.name): str(w.pattern) for w in weights},
        # one text, since torch.distributed.checkpoint loads only keys that are there already
        "dtypes": " ".join(f"{key}={dtype}" for key, dtype in sorted(dtypes.items())),
        "state": recipe.state_dict(),
    }


def check_settings(
    settings: dict[str, Any] | None, recipe: Recipe, weights: Sequence[SparseWeight]
) -> None:
    """Raise ConfigError unless saved settings are of this version, recipe, ratio and choice of
    weights. None, from a training without nmrun, fits."""
    if settings is None:
        return
    present = settings_of(recipe, weights)
    there, here = ({**each, **each["weights"]} for each in (settings, present))
    keys = ("version", "recipe", "pattern", *sorted({**settings["weights"], **present["weights"]}))
    for key in keys:
        if there.get(key) != here.get(key):
            raise ConfigError(
                f"the state is of another training ({key} is {there.get(key)} there and "
                f"{here.get(key)} here): call sparsify as for that one, or load the model alone"
            )


def check_saved(optimizer: torch.optim.Optimizer, weights: Sequence[SparseWeight]) -> None:
    """Raise ConfigError where a ``state_dict`` of the optimizer's own has not what :class:`Resume`
    adds."""
    if type(optimizer).state_dict in (torch.optim.Optimizer.state_dict, EagerOptimizer.state_dict):
        return
    saved = optimizer.state_dict()
    needs_tensors = any(weight.saved() for weight in weights)
    has_tensors = any(
        str(key).startswith(PREFIX)
        for state in _of_parameters(saved.get("state", {}))
        for key in state
    )
    if not saved_settings(saved.get("param_groups") or ()) or (needs_tensors and not has_tensors):
        raise ConfigError(
            f"{type(optimizer).__name__} leaves the dense weights out of its state dict, and a "
            "resume would lose them: use its base optimizer alone, or sparsify each optimizer in it"
        )


def check_dense(settings: dict[str, Any], weights: Sequence[SparseWeight]) -> None:
    """Raise ConfigError where the state of a sparse phase came without dense weights."""
    missing = next((w.name for w in weights if not w.has_dense), "")
    if missing and not settings["state"]["dense_forward"]:
        raise ConfigError(
            f"the loaded state has no dense weight of {missing}. With torch.distributed.checkpoint, "
            "call handle.make_room before it loads; with broadcast_from_rank0, load the state in "
            "every process; copy an optimizer after its first step"
        )


def saved_settings(groups: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The :func:`settings_of` a training, in the parameter groups of an optimizer or of its state
    dict; None without."""
    settings = groups[0].get(KEY) if groups else None
    return settings if isinstance(settings, dict) else None


def dtypes_of(settings: dict[str, Any]) -> dict[str, str]:
    """The dtypes of the saved tensors that differ from their parameter's, such as ``bool``, by
    name."""
    return dict(entry.split("=") for entry in settings["dtypes"].split())


def _of_parameters(states: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The states of parameters. Some optimizers count their steps beside them, in a number or a
    tensor (``state["k"]`` of pytorch_optimizer's MADGRAD)."""
    return [state for state in states.values() if isinstance(state, dict)]


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has a state of any parameter."""
    return any(_of_parameters(optimizer.state))


@torch.no_grad()
def makes_state(optimizer: torch.optim.Optimizer, weights: Sequence[SparseWeight]) -> bool:
    """Whether the coming step only initialises the optimizer's state: it has none yet, all learning
    rates are 0, and all gradients are 0 on all ranks. torch.distributed.checkpoint makes such a
    step before it saves or loads. A recipe must not count it."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if any(lr is None or getattr(lr, "is_cuda", False) or float(lr) != 0 for lr in rates):
        return False
    if has_state(optimizer):
        return False
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [local(p.grad) for p in owned if p.grad is not None]
    if not grads:
        return False
    # those of nn.Embedding(sparse=True) cannot be counted as they are
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    moves = sum((torch.count_nonzero(value) for value in values), torch.zeros((), dtype=torch.long))
    for part in alike(weights):  # more than once is as good as once
        moves = added(part, moves)
    return not moves
