"""The weights of a run: initial weights, how every process holds them, and their mean over the last
epochs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nmrun.errors import ConfigError, RunError, first_line, refused
from nmrun.lab import models, ranks
from nmrun.lab.keys.config import Config
from nmrun.lab.runs.run_folder import WEIGHTS, own_weights, weights_in
from nmrun.lab.tasks.base import Task
from nmrun.sparsity.weight import SparseWeight
from nmrun.step.handle import Handle


def network(config: Config, task: Task) -> nn.Module:
    """Build a run's network with the weights that it begins with. ConfigError where ``init`` is no
    finished run of the same network."""
    model = models.build(config.model.mapping(), task.inputs)
    # on meta, another process has the values
    if config.init is not None and not any(p.is_meta for p in model.parameters()):
        heads = getattr(model, "heads_of_tasks", ())
        # another activation may be the point of the run
        load(model, config, config.init, f"init={config.init}", ("heads",), heads)
    return model


def check(place: str, setting: str) -> None:
    """Check that weights which a recipe reads are as their run left them. Files outside a run's
    folder are not checked. ``setting`` is the key and value for errors. ConfigError where they were
    changed."""
    folder, file = weights_in(place)
    if file in WEIGHTS:
        with refused(f"{setting}: ", RunError):
            folder.checked(file)


def load(
    model: nn.Module,
    config: Config,
    place: str,
    setting: str,
    alike: Collection[str],
    heads: Collection[str] = (),
) -> None:
    """Give a network the weights of a finished run: ``place`` is its folder, for its last weights,
    or a file of weights in it. Or it is a file of the user's own (:func:`read`).

    ``alike`` are keys of the network that do not show in the shapes of its weights. ``heads`` are
    modules that may be another task's: they stay where the run has none of the same shape.
    ``setting`` is the key and value for errors. ConfigError where no finished run is there, another
    network's, or weights that were changed since.
    """
    path = own_weights(place)
    folder, file = weights_in(place)
    if path is None:
        folder.demand(setting, file)
        check(place, setting)
        path = folder.path / file
    state = read(path, setting)
    here, there = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (model.state_dict(), state)
    )
    ours, theirs = config.model.values(), folder.config.get("model", {})
    for key in alike:
        if key in ours and key in theirs:
            here[f"model.{key}"], there[f"model.{key}"] = ours[key], theirs[key]
    unlike = {name for name in {*here, *there} if here.get(name) != there.get(name)}
    left_out = {name for name in unlike if name.partition(".")[0] in heads}
    for name in sorted(unlike - left_out):
        raise ConfigError(
            f"{setting} is another network than this run's: {name} is {there.get(name, 'missing')} "
            f"there and {here.get(name, 'missing')} here"
        )
    kept = {name: tensor for name, tensor in state.items() if name not in left_out}
    model.load_state_dict(kept, strict=not left_out)


def read(path: Path, setting: str) -> dict[str, Tensor]:
    """The tensors by name in a safetensors file, or in what ``torch.save`` has written of a state
    dict: alone, or as ``model`` or ``state_dict`` of a checkpoint; what DDP adds to names is taken
    away. ConfigError for another file."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:  # torch's own line advises weights_only=False, which runs any code
        state = None
    except MemoryError:
        raise
    except Exception as error:  # damage can raise any exception
        said = f"{setting}: {path.name} cannot be read: {first_line(error)}"
        raise ConfigError(said) from None
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ConfigError(f"{setting}: {path.name} has no state dict: tensors by their names")
    if all(name.startswith("module.") for name in state):
        return {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return dict(state)


# --- in the processes -----------------------------------------------------------------------------


class Replicated:
    """A sparse model, its optimizer and its handle, whole in every process; in shards it is
    ``nmrun.lab.train.fsdp.Sharded``.

    Attributes:
        in_step: whether a process can pass through the model only together with all others.
    """

    in_step: ClassVar[bool] = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, handle: Handle) -> None:
        self.model, self.optimizer, self.handle = model, optimizer, handle

    def forward(self, model: Any) -> Any:
        """``model``, compiled or not, with gradients averaged over the ranks if there are some."""
        return DistributedDataParallel(model) if ranks.world() > 1 else model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def distribute(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's parts of tensors by name: as they are."""
        return dict(tensors)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`distribute`, for a file: on the CPU, contiguous."""
        return {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}

    def final_state_dict(self) -> dict[str, Tensor]:
        """Copies on the CPU of what the model would have if training ended now, sparse weights N:M."""
        sparse = {weight.name: weight for weight in self.handle.sparse}
        saved = sorted(self.model.state_dict().items())
        # one by one: a device may have no room for all of them twice
        return {
            name: _copy(self._final(sparse[name]) if name in sparse else t) for name, t in saved
        }

    def dense_state_dict(self) -> dict[str, Tensor]:
        """Likewise of what it has, with the dense weights in the place of the sparse ones."""
        with self.handle.dense_weights():
            return {name: _copy(t) for name, t in sorted(self.model.state_dict().items())}

    def _final(self, weight: SparseWeight) -> Tensor:
        return self.handle.final_weight(weight)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class Average:
    """The mean of a model's parameters and running statistics over the ends of the ``last`` epochs;
    1 does nothing (Vaswani et al. 2017, arXiv 1706.03762, section 6.1).

    Of a sparse weight the dense one is averaged. The mask is that of the mean, or the recipe's if
    it is fixed."""

    def __init__(self, model: nn.Module, handle: Handle, last: int) -> None:
        self.model, self.handle, self.last = model, handle, last
        self.sums: dict[str, Tensor] = {}
        self.count = 0
        handle.stepper.followers.append(self._reorder)

    @torch.no_grad()
    def add(self, remaining: int) -> None:
        if self.last == 1 or remaining >= self.last:
            return
        with self.handle.dense_weights():
            for name, tensor in self._tensors().items():
                self.sums[name] = self.sums[name] + tensor if self.count else tensor.clone()
        self.count += 1

    @torch.no_grad()
    def apply(self) -> None:
        """Give the model the mean of what was added, if that was anything."""
        if not self.count:
            return
        with self.handle.dense_weights():
            for name, tensor in self._tensors().items():
                tensor.copy_(self.sums[name] / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self.sums), "count": self.count}

    def load_state_dict(
        self,
        state: dict[str, Any],
        distribute: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    ) -> None:
        """Restore :meth:`state_dict`; ``distribute`` gives this process's parts of whole
        tensors."""
        self.count, sums = state["count"], distribute(state["sums"])
        tensors = self._tensors() if self.count else {}
        self.sums = {name: sums[name].to(tensor.device) for name, tensor in tensors.items()}

    def _reorder(self, name: str, dim: int, index: Tensor) -> None:
        """Reorder the sum of a tensor that became ``t.index_select(dim, index)``."""
        if name in self.sums:
            self.sums[name] = self.sums[name].index_select(dim, index)

    def _tensors(self) -> dict[str, Tensor]:
        saved = self.model.state_dict(keep_vars=True).items()
        return {name: t.detach() for name, t in saved if t.is_floating_point()}
