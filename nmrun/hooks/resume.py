"""What of a sparse training is saved with the optimizer, how it comes back, and when it is done.

The recipe's clock lies in ``optimizer.param_groups[0]["nmrun"]`` (plain data), the weights' tensors
in ``optimizer.state[parameter]``. So whoever saves and loads model and optimizer resumes exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nmrun.errors import ConfigError, RunError
from nmrun.kernels.layout import local
from nmrun.recipes.base import Recipe
from nmrun.sparsity.shards import summed
from nmrun.sparsity.weight import SparseWeight

KEY = "nmrun"
VERSION = 1  # of what is saved
# parts of names that wrappers add
WRAPPED = r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module)\."


class Resume:
    """Keeps the optimizer's state dict complete, and takes back what was loaded into it.

    Args:
        optimizer: the one that steps the weights.
        recipe: the recipe, with its clock.
        weights: the sparse weights.
        refresh: writes the projections of the dense weights into the parameters.
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
        self._without: list[SparseWeight] = []
        self._room: dict[str, dict[str, Any]] = {}  # by weight and key: what will be loaded

    def make_room(self, metadata: Any) -> None:
        """Let the next state dict have the keys that a saved one has: see ``Handle.make_room``."""
        plain = {re.sub(WRAPPED, "", w.name): w.name for w in self.weights}
        for key, saved in metadata.state_dict_metadata.items():
            own, _, last = key.rpartition(".")
            match = re.fullmatch(r"(?:.*\.)?state\.(.*)", own)
            if match and match[1] in plain and hasattr(saved, "properties"):
                self._room.setdefault(plain[match[1]], {})[last] = saved

    def _fill_room(self) -> None:
        for weight in self.weights:
            wanted = self._room.get(weight.name, {})
            state = self.optimizer.state[weight.parameter]
            for key in [key for key in state if wanted and key not in wanted]:
                del state[key]
            for key, saved in wanted.items():
                kind, like = saved.properties.dtype, weight.parameter.detach()
                if key not in state and saved.size == like.shape:
                    state[key] = torch.zeros_like(like, dtype=kind)
                elif key not in state:
                    state[key] = torch.zeros(saved.size, dtype=kind, device=like.device)

    def hooks(self) -> list[Any]:
        """Hooks of the optimizer's ``state_dict`` and ``load_state_dict``, to be removed."""
        return [
            self.optimizer.register_state_dict_pre_hook(lambda _: self._before_saving()),
            self.optimizer.register_state_dict_post_hook(
                lambda _, state: self._after_saving(state)
            ),
            self.optimizer.register_load_state_dict_pre_hook(
                lambda _, state: self.check(_settings_of(state["param_groups"]))
            ),
            self.optimizer.register_load_state_dict_post_hook(lambda _: self.take_back()),
        ]

    def settings(self) -> dict[str, Any]:
        """The recipe's clock and what it has to fit: plain data."""
        recipe = self.recipe
        return {
            "version": VERSION,
            "recipe": recipe.name,
            "pattern": str(recipe.pattern),
            "weights": {w.name: str(w.pattern) for w in self.weights},
            "dtypes": _as_text(self.weights),
            "state": recipe.state_dict(),
        }

    def _before_saving(self) -> None:
        state = self.optimizer.state
        self._without = [w for w in self.weights if not state.get(w.parameter)]
        self.optimizer.param_groups[0][KEY] = self.settings()
        for weight in self.weights:
            weight.put_state(self.optimizer)
        if self._room:
            self._fill_room()

    def _after_saving(self, state_dict: dict[str, Any]) -> None:
        """Leave an optimizer that has not begun without state: torch.distributed.checkpoint makes
        what it will load into only there. And give every parameter an entry, as it expects: plain
        SGD has none of its own, and the sparse weights alone would have one."""
        state_dict["state"] = {number: dict(own) for number, own in state_dict["state"].items()}
        for weight in self._without:
            weight.pop_state(self.optimizer)
        for group in state_dict["param_groups"]:
            for number in group["params"]:
                if state_dict["state"]:
                    state_dict["state"].setdefault(number, {})

    def check(self, settings: dict[str, Any] | None) -> None:
        """Hold saved settings against this recipe; None, from a training without nmrun, fits.

        Raises:
            ConfigError: for another recipe, ratio or choice of weights.
        """
        if settings is None:
            return
        own = self.settings()
        if settings.get("version") != VERSION:
            raise ConfigError(
                "this state was saved by another version of nmrun, which keeps weights elsewhere: "
                "finish it there, and start from the finished model"
            )
        for key, called in (("recipe", "recipe"), ("pattern", "pattern")):
            if settings[key] != own[key]:
                raise ConfigError(
                    f"this state is of {called} {settings[key]}, the handle is of {own[key]}: "
                    f"call sparsify with the former, or load the model alone"
                )
        if settings["weights"] != own["weights"]:
            other = sorted(dict(settings["weights"].items() ^ own["weights"].items()))
            raise ConfigError(
                f"this state has other sparse weights or patterns than the handle ({other[0]}): "
                "call sparsify with the same include, exclude, overrides and pad"
            )

    def take_back(self) -> None:
        """The optimizer's state was loaded: its clock and tensors are ours now."""
        self._room = {}
        settings = _settings_of(self.optimizer.param_groups)
        if settings is None:  # saved without nmrun: the recipe goes on from where it is
            self._before_saving()
            return
        for weight in self.weights:
            weight.clear()  # what counts is what was saved
            weight.pop_state(self.optimizer, dtypes_of(settings))
            if not (settings["state"]["dense_forward"] or weight.has_dense):
                raise ConfigError(
                    f"the loaded state has no dense weight of {weight.name}: what it was loaded "
                    "into by torch.distributed.checkpoint was still in its dense phase (call "
                    "handle.make_room before), or was broadcast_from_rank0 (load it everywhere)"
                )
        self.restore(settings)

    def restore(self, settings: dict[str, Any]) -> None:
        """Go on from these settings, with the tensors that the weights have."""
        self.recipe.load_state_dict(settings["state"])
        self.refresh()
        for weight in self.weights:
            weight.put_state(self.optimizer)


def saved_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The settings in the state that was loaded into an optimizer, if there are any."""
    return _settings_of(optimizer.param_groups)


def dtypes_of(settings: dict[str, Any]) -> dict[str, str]:
    """The dtypes of saved tensors that have not their parameter's, by the tensors' names."""
    return dict(entry.split("=") for entry in settings["dtypes"].split())


def _as_text(weights: Sequence[SparseWeight]) -> str:
    # one text, since torch.distributed.checkpoint loads only keys that are there already
    every = {key: dtype for w in weights for key, dtype in w.dtypes.items()}
    return " ".join(f"{key}={dtype}" for key, dtype in sorted(every.items()))


def _settings_of(groups: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    found = groups[0].get(KEY) if groups else None
    return found if isinstance(found, dict) else None


@torch.no_grad()
def makes_state(optimizer: torch.optim.Optimizer, weights: Sequence[SparseWeight]) -> bool:
    """Whether a step is none: torch.distributed.checkpoint makes an optimizer's state by a step
    with rate 0 and gradients of 0, before it saves or loads.

    Args:
        optimizer: the one that is about to step.
        weights: the sparse weights.

    Returns:
        Whether it has no state yet, no rate and no gradient, on any rank.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    if any(lr is None or getattr(lr, "is_cuda", False) or float(lr) != 0 for lr in rates):
        return False
    if any(optimizer.state.values()):
        return False
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [local(p.grad) for p in owned if p.grad is not None]
    if not grads:
        return False
    moves = sum((torch.count_nonzero(grad) for grad in grads), torch.zeros((), dtype=torch.long))
    return not summed(weights, moves)


def check_finished(recipe: Recipe, weights: Sequence[SparseWeight], differs: str) -> None:
    """Whether the weights may be left as they are.

    Args:
        recipe: the recipe, with its clock.
        weights: the sparse weights.
        differs: a weight that is not the projection of its dense weight, or an empty string.

    Raises:
        RunError: with the reason why not.
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
    """The parameter of this name in a copy of the model, also inside wrappers (EMA, DDP).

    Raises:
        ConfigError: where there is none.
    """
    parameters = dict(model.named_parameters())
    for found in (name, f"module.{name}", f"_orig_mod.{name}", f"module._orig_mod.{name}"):
        if found in parameters:
            return parameters[found]
    raise ConfigError(f"this model has no parameter {name}: finalize takes a copy of the model")
