"""A model of which every process holds a part (FSDP2): how it is built, trained, saved and loaded.

``fully_shard`` first, then the optimizer over the sharded parameters, then ``nmrun.sparsify``, as in a
user's own script. No GPU ever holds the whole model: the leader's host does, while it builds it and
while it writes the final weights. Every process writes its own shards, in a folder of files by
``torch.distributed.checkpoint``, which gives them to any other number of processes too.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, empty

from nmrun.errors import ConfigError, RunError, refused
from nmrun.kernels.layout import part_like
from nmrun.lab import ranks
from nmrun.lab.keys.config import Config
from nmrun.lab.runs import documents
from nmrun.lab.tasks.base import Task
from nmrun.lab.train.weights import Replicated, network
from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity.select import select
from nmrun.sparsity.weight import SparseWeight

FROM_LEADER = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def check(config: Config, recipe: Recipe, task: Task, precision: str) -> None:
    """Refuse what cannot be trained on shards; ConfigError says what to use instead."""
    trainer, reason = config.trainer, ""
    whole = {
        "compile": trainer.compile,
        "input_gradient": trainer.input_gradient != "exact",
        "precision": precision == "fp16",  # which scales the loss by whole gradients
    }
    if wrong := [key for key, needed in whole.items() if needed]:
        reason = f"trainer.{wrong[0]}={getattr(trainer, wrong[0])} needs whole weights"
    elif recipe.looks_across_rows or recipe.pattern.v > 1:
        permuted = " with permute=true" if getattr(recipe, "permute", False) else ""
        what = f"recipe {recipe.name}{permuted}, at {recipe.pattern},"
        reason = f"{what} looks across the rows of a weight"
    elif task.metric == "bleu":
        reason = "beam search calls parts of the model"
    if reason:
        raise ConfigError(
            f"trainer.distributed=fsdp keeps shards of each weight, and {reason}: "
            "use trainer.distributed=ddp"
        )


def build(config: Config, task: Task, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The model with a part of each parameter in every process, and a whole copy without values."""
    model = built(lambda: network(config, task))
    transposed: set[str] = set()
    if config.recipe.name != "dense":
        sparse, _ = select(
            model,
            Pattern.parse(config.pattern or "2:4"),
            config.model.include,
            config.model.exclude,
            overrides=config.sparsity.overrides,
            pad=config.sparsity.pad,
        )
        transposed = {weight.name for weight in sparse if weight.dim == 0}
    whole = without_values(model)
    shard(model, device, transposed)
    return model, whole


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with values in the leader, and without in the others: :func:`shard` gives them.

    What does not build on the meta device (its code reads values) is built on the CPU everywhere.
    Random generators are the leader's afterwards.
    """
    before = torch.get_rng_state()
    model = None
    if not ranks.leads():
        try:
            with torch.device("meta"):
                model = make()
        except RuntimeError:  # also of an operator that the meta device lacks
            torch.set_rng_state(before)
    if model is None:
        model = make()
    state = torch.get_rng_state()
    dist.broadcast(state, src=0)
    torch.set_rng_state(state)
    return model


def without_values(model: nn.Module) -> nn.Module:
    bare: dict[int, Any] = {id(b): b.to("meta") for b in model.buffers()}
    for p in model.parameters():
        bare[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, bare)


def shard(model: nn.Module, device: torch.device, transposed: Collection[str] = ()) -> None:
    """Let every process keep its part of each parameter, with the leader's values, on ``device``.

    Parameters in ``transposed``, which are stored (in, out), are cut along their second dimension,
    all others along their first. ConfigError for what torch cannot cut: single numbers, and outputs
    of a transposed weight that the processes do not divide.
    """
    along = {id(p): 1 for name, p in model.named_parameters() if name in transposed}
    on_meta = any(p.is_meta for p in model.parameters())
    values = model.state_dict() if ranks.leads() else {}
    mesh = init_device_mesh(device.type, (ranks.world(),))
    with refused("trainer.distributed=fsdp: ", ValueError, NotImplementedError):
        for block in [*_blocks(model), model]:
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=True,
                shard_placement_fn=lambda p: Shard(along.get(id(p), 0)),
            )
    model.to_empty(device=device) if on_meta else model.to(device)
    set_model_state_dict(model, values, options=FROM_LEADER)
    _agree(model.buffers())  # also those that are in no state dict


class Sharded(Replicated):
    """A sparse model, its optimizer and its handle, of which every process has a part. All
    processes have to call each method. Whole parameters exist one at a time."""

    in_step = True

    def forward(self, model: Any) -> Any:
        """``model`` as it is: its gradients are averaged over the ranks and cut already."""
        return model

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in parts or whole; every rank has to have it, if only
        mapped."""
        self.model.load_state_dict(self.distribute(state["model"]))
        saved = state["optimizer"]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        likes = dict(zip(numbers, parameters, strict=True))
        parts = {
            number: {key: part_like(value, likes[number]) for key, value in entries.items()}
            for number, entries in saved["state"].items()
        }
        self.optimizer.load_state_dict({**saved, "state": parts})

    def distribute(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's parts of tensors by name; tensors that are sharded already stay as they
        are."""
        state = self.model.state_dict()
        return {name: part_like(tensor, state.get(name)) for name, tensor in tensors.items()}

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`distribute`: the leader gets whole tensors on the CPU, the others
        none."""
        state = {}
        for name, tensor in tensors.items():
            whole: Any = tensor
            if isinstance(tensor, DTensor):  # on the device: one at a time
                whole = whole.to(tensor.device_mesh.device_type).full_tensor()
            if ranks.leads():
                state[name] = whole.detach().to("cpu", copy=True).contiguous()
        return state

    def _final(self, weight: SparseWeight) -> Tensor:
        part: Tensor = weight.as_shard(self.handle.final_weight(weight))
        return part


def _agree(buffers: Iterable[Tensor]) -> None:
    for buffer in buffers:
        whole = buffer.detach().contiguous()
        dist.broadcast(whole.view(torch.uint8) if whole.dtype == torch.bool else whole, src=0)
        buffer.detach().copy_(whole)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP gathers one at a time: the items of every outermost list of layers,
    except those that share a parameter with others."""
    users = _users(model)
    blocks: list[nn.Module] = []
    outer: list[str] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{other}.") for other in outer)
        if isinstance(module, nn.ModuleList | nn.Sequential) and name and not inner:
            outer.append(name)
            for child in module.children():
                own = _users(child)
                if own and all(users[number] == count for number, count in own.items()):
                    blocks.append(child)
    return blocks


def _users(model: nn.Module) -> Counter[int]:
    """How often each parameter is used in a model."""
    return Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))


# --- on the disk ----------------------------------------------------------------------------------

Tensors = Mapping[tuple[Any, ...], Any]  # sharded tensors by their path in a nested dict


def save_shards(folder: Path, parts: Tensors) -> dict[str, Any]:
    """Write one-dimensionally sharded tensors to a new folder that all processes see. All ranks
    call; when they return, it is whole and on the disk.

    Returns plain data for :func:`damaged_shards` and :func:`load_shards`. RunError where a file cannot
    be written; the folder is removed.
    """
    named = {_key(path): part for path, part in parts.items()}
    try:
        writer = filesystem.FileSystemWriter(folder)
        _with_plain_errors(lambda: state_dict_saver.save(named, storage_writer=writer))
    except RunError:
        if ranks.leads():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    names: list[str] = []
    if ranks.leads():
        names = sorted(os.listdir(folder))
        sync_folder(folder)
    return {
        "folder": folder.name,
        "files": _checksums(folder, ranks.from_leader(names)),
        "tensors": {
            path: (part.shape, part.dtype, part.placements[0].dim) for path, part in parts.items()
        },
    }


def damaged_shards(folder: Path, record: dict[str, Any]) -> str:
    """What is wrong with the files of a folder; empty if every bit is as written. All ranks call;
    each reads some of the files."""
    place = folder / record["folder"]
    checksums = _checksums(place, sorted(record["files"]))
    wrong = [name for name, checksum in record["files"].items() if checksums[name] != checksum]
    return f"the checksum of {record['folder']}/{wrong[0]} is wrong" if wrong else ""


def load_shards(
    folder: Path, record: dict[str, Any], model: nn.Module
) -> dict[tuple[Any, ...], Tensor]:
    """This process's parts if the model is sharded, in however many processes, else whole tensors
    on the CPU. All ranks call. RunError where a file cannot be read."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    tensors: dict[tuple[Any, ...], Tensor] = {}
    for path, (shape, dtype, dim) in record["tensors"].items():
        if not meshes:
            tensors[path] = torch.empty(shape, dtype=dtype)
        else:
            placed = [Shard(dim)]
            tensors[path] = empty(shape, dtype=dtype, device_mesh=meshes[0], placements=placed)
    named: dict[str, Any] = {_key(path): tensor for path, tensor in tensors.items()}
    reader = filesystem.FileSystemReader(folder / record["folder"])
    _with_plain_errors(lambda: state_dict_loader.load(named, storage_reader=reader))
    return tensors


def sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _key(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _with_plain_errors(work: Callable[[], object]) -> None:
    """Torch's exception is no subclass of ``Exception``, and its text has the traceback of each
    rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            work()
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise RunError(f"the shards of rank {rank}: {type(reason).__name__}: {reason}") from error


def _checksums(folder: Path, names: list[str]) -> dict[str, str]:
    """Checksums by the names of files, empty for what cannot be read. Every rank reads its
    share."""
    checksums = {}
    for name in names[ranks.rank() :: ranks.world()]:
        try:
            with documents.opened(folder / name) as file:
                checksums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            checksums[name] = ""
    return {name: checksum for part in ranks.gathered(checksums) for name, checksum in part.items()}
