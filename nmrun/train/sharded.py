"""One run in several processes for a model that outgrows a GPU: FSDP2, every rank holds its rows of each weight.

Rows are outputs, and groups run along the inputs: a rank projects its own rows without the others', once per optimizer step. What FSDP
gathers for a block and lets go again are the projected rows, so no rank ever has a whole working copy, and the gradient that comes
back is that of the dense rows (straight-through). The optimizer and the recipe see the rows as ordinary tensors; where a recipe needs
a sum over all rows, it asks for it (``nmrun.sparsity.weight.summed``). Checkpoints are those of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Along

from nmrun import ranks
from nmrun.errors import ConfigError
from nmrun.handle import Handle
from nmrun.recipes.base import Recipe
from nmrun.settings.config import Config
from nmrun.tasks.base import Task

Entries = dict[str, tuple[Tensor, "Shard | None"]]  # tensors of this rank; those with a shard are its part of a whole
# of the trainer: what each option has to be
ALONE: dict[str, Any] = {
    "compile": False,
    "mvue": None,
    "fp8": False,
    "average": 1,
    "diagnose_every": None,
    "input_gradient": "exact",
}


class Shard:
    """This rank's rows of one parameter: ``rows`` is what the optimizer owns, ``gathered`` what FSDP makes whole for a forward pass.

    Of a sparse weight the one holds the dense weights and the other the projected ones; else both share their memory.
    """

    def __init__(self, gathered: Any, rows: nn.Parameter) -> None:
        self.gathered, self.rows = gathered, rows
        self.dim = next(p.dim for p in gathered.placements if isinstance(p, Along))

    def whole(self, rows: Tensor) -> Tensor:
        """Every rank's rows of a tensor shaped like the parameter, on every rank (all of them have to call)."""
        plain = rows.view(torch.uint8) if rows.dtype == torch.bool else rows
        like = self.gathered
        full = DTensor.from_local(
            plain.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()
        return full.view(rows.dtype)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor: the inverse of :meth:`whole`."""
        return cut(whole, self.dim)


def cut(whole: Tensor, dim: int) -> Tensor:
    """This rank's part along ``dim``, as FSDP cuts: equal parts rounded up, so that the last ranks may have fewer or none."""
    size = whole.shape[dim]
    part = -(-size // ranks.world())
    begin = min(ranks.rank() * part, size)
    return whole.narrow(dim, begin, min(part, size - begin))


def check(config: Config, recipe: Recipe, task: Task, precision: str) -> None:
    """Raise ConfigError for what cannot be trained on shards."""
    trainer, found = config.trainer, ""
    if not recipe.by_rows:
        permuted = " with permute=true" if getattr(recipe, "permute", False) else ""
        found = f"recipe {recipe.name}{permuted} looks across the rows of a weight"
    elif wrong := [key for key, value in ALONE.items() if getattr(trainer, key) != value]:
        found = f"trainer.{wrong[0]}={getattr(trainer, wrong[0])} needs whole weights"
    elif precision == "fp16":
        found = "trainer.precision=fp16 scales the loss by whole gradients (bf16 and fp32 need not)"
    elif task.metric == "bleu":
        found = "beam search calls parts of the model"
    if found:
        raise ConfigError(f"trainer.distributed=fsdp keeps shards of each weight, and {found}: use trainer.distributed=ddp")


class Sharded:
    """A sparse model, its optimizer and its handle, all made in one process, turned into shards on ``device``.

    Raises ConfigError for parameters that cannot be cut.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, handle: Handle, device: torch.device) -> None:
        self.model, self.optimizer, self.sparse = model, optimizer, list(handle.sparse)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(f"trainer.distributed=fsdp cannot cut {name}, a single number: use trainer.distributed=ddp")
        along = {}
        dense: dict[str, nn.Parameter] = {}
        for w in self.sparse:
            along[id(w.dense)] = dim = 1 - w.dim
            if dim and w.shape[dim] % ranks.world():
                raise ConfigError(
                    f"trainer.distributed=fsdp cannot cut the {w.shape[dim]} outputs of {w.name}, which is stored transposed, for "
                    f"{ranks.world()} processes evenly: use trainer.distributed=ddp"
                )
            dense[w.name] = nn.Parameter(cut(w.dense.detach(), dim).to(device, copy=True))
            for name, buffer in list(w.projection.named_buffers()):
                if buffer.shape == w.shape:
                    setattr(w.projection, name, cut(buffer, dim).clone())
        # by names, since whoever holds a parameter holds it whole
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [[names[id(p)] for p in group.pop("params")] for group in optimizer.param_groups]
        mesh = init_device_mesh(device.type, (ranks.world(),))
        for block in [*_blocks(model), model]:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, shard_placement_fn=lambda p: Along(along.get(id(p), 0)))

        self.shards: dict[int, Shard] = {}
        rows: dict[str, nn.Parameter] = {}
        own = {id(w.original): dense[w.name] for w in self.sparse}
        for name, parameter in model.named_parameters():
            local = nn.Parameter(parameter._local_tensor, requires_grad=parameter.requires_grad)  # type: ignore[attr-defined]
            rows[name] = own.get(id(parameter), local)
            self.shards[id(parameter)] = Shard(parameter, rows[name])
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [rows[name] for name in members]
        for w in self.sparse:
            w.projection.shard = shard = self.shards[id(w.original)]
            w.projection.projected = shard.gathered._local_tensor
        handle.refresh()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the gradients that FSDP has reduced to the rows that the optimizer owns."""
        for shard in self.shards.values():
            gradient = shard.gathered.grad
            shard.rows.grad = None if gradient is None else gradient._local_tensor  # type: ignore[attr-defined]
            shard.gathered.grad = None

    # --- what is saved ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of the model in one process, on the CPU; empty but on the leader. All ranks have to call, here and below."""
        return _on_leader(self._saved())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`; that of the handle has to follow."""
        _load(self._saved(), state)

    def baked_state_dict(self) -> dict[str, Tensor]:
        """The state dict of the finished model (``nmrun.sparsity.baked_state_dict``), on the CPU; empty but on the leader."""
        projected = {w.name: (w.projected + 0.0, w.projection.shard) for w in self.sparse}
        return dict(sorted(_on_leader(self._forward() | projected).items()))

    def load_baked_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Let forward passes use the leader's :meth:`baked_state_dict`; training is over."""
        _load(self._forward(), state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer in one process, on the CPU; without moments but on the leader."""
        state = self.optimizer.state_dict()
        flat = {
            (index, key): (value, self._shard(index) if isinstance(value, Tensor) and value.dim() else None)
            for index, entries in state["state"].items()
            for key, value in entries.items()
        }
        moments: dict[int, dict[str, Any]] = {}
        for (index, key), value in _on_leader(flat).items():
            moments.setdefault(index, {})[key] = value
        return {**state, "state": moments}

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`optimizer_state_dict`, which every rank has to have."""
        moments = {
            index: {
                key: self._shard(index).cut(value).clone() if isinstance(value, Tensor) and value.dim() else value
                for key, value in entries.items()
            }
            for index, entries in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": moments})

    def _shard(self, index: int) -> Shard:
        """The shard of the optimizer's parameter of this number."""
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        return next(shard for shard in self.shards.values() if shard.rows is owned[index])

    def _saved(self) -> Entries:
        """What a checkpoint has: of sparse weights the dense rows, and the recipe's buffers."""
        own = {id(b): w.projection.shard for w in self.sparse for b in w.projection.buffers() if b.shape == w.dense.shape}
        entries: Entries = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            shard = self.shards.get(id(tensor), own.get(id(tensor)))
            entries[name] = (shard.rows if shard is not None and isinstance(tensor, DTensor) else tensor, shard)
        return entries

    def _forward(self) -> Entries:
        """What a forward pass uses, under the names of the finished model."""
        names = {id(w.original): w.name for w in self.sparse}
        entries: Entries = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            shard = self.shards.get(id(tensor))
            if shard is not None:
                entries[names.get(id(tensor), name)] = (shard.gathered._local_tensor, shard)
            elif ".parametrizations." not in f".{name}":
                entries[name] = (tensor, None)
        return entries


def _on_leader(entries: Mapping[Any, tuple[Any, Shard | None]]) -> dict[Any, Any]:
    """Copies of whole tensors on the CPU, made one after the other; kept by the leader alone."""
    kept = {}
    for name, (value, shard) in entries.items():
        whole = value if shard is None else shard.whole(value.detach())
        if ranks.leads():
            kept[name] = whole.detach().to("cpu", copy=True) if isinstance(whole, Tensor) else whole
    return kept


@torch.no_grad()
def _load(entries: Entries, state: Mapping[str, Tensor]) -> None:
    names = ranks.from_leader(list(state))
    if missing := entries.keys() ^ set(names):
        raise ValueError(f"not both in the model and in what is to be loaded: {', '.join(sorted(missing))}")
    for name, (target, shard) in entries.items():
        shape = target.shape if shard is None else shard.gathered.shape
        whole = torch.empty(shape, dtype=target.dtype, device=target.device)
        if ranks.leads():
            whole.copy_(state[name])
        dist.broadcast(whole.view(torch.uint8) if whole.dtype == torch.bool else whole, src=0)
        target.copy_(whole if shard is None else shard.cut(whole))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What FSDP gathers at a time: the items of every outermost list of layers, but for those that share a parameter with others."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    found: list[nn.Module] = []
    outer: list[str] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{other}.") for other in outer)
        if isinstance(module, nn.ModuleList | nn.Sequential) and name and not inner:
            outer.append(name)
            for part, child in module.named_children():
                own = list(child.parameters())
                if own and all(user.startswith(f"{name}.{part}.") for p in own for user in users[id(p)]):
                    found.append(child)
    return found
