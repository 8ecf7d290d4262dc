"""What a user's own script does in several processes, for test_user_ranks.py.

``python user_ranks.py ddp|fsdp|tensor FOLDER`` under torchrun trains every case and leaves what came out
in ``FOLDER/<kind>.pt``. Ranks compare themselves here, and what they end with is compared there.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from user_training import (
    CASES,
    DRAWN,
    OPTIMIZERS,
    RECIPES,
    STOP,
    TOTAL,
    Started,
    measured,
    net,
    outcome,
    pairs,
    same_everywhere,
    sparse,
    step,
    whole_step,
)

import nmrun
from nmrun.errors import ConfigError

# --- replicated ----------------------------------------------------------------------------------


def ddp(recipe: str, name: str, how: str) -> dict[str, Tensor]:
    """``how``: what of DDP and sparsify comes first, with which seeds, with accumulation or not."""
    model: nn.Module = net(dist.get_rank() if "seeds" in how else 0)
    if "sparsify first" in how:
        optimizer = OPTIMIZERS[name](model.parameters())
        handle = sparse(model, optimizer, recipe)
        model = DistributedDataParallel(model)
    else:
        model = DistributedDataParallel(model)
        optimizer = OPTIMIZERS[name](model.parameters())
        handle = sparse(model, optimizer, recipe)
    for number in range(TOTAL):
        step(model, optimizer, number, parts=2 if "no_sync" in how else 1)
    weights = outcome(model, optimizer, handle)
    same_everywhere(weights, (recipe, name, how))
    return weights


WAYS = ("ddp first", "sparsify first", "ddp first, seeds", "sparsify first, seeds", "no_sync")


def replicated() -> dict[Any, dict[str, Tensor]]:
    """Every case in every way, and what is refused."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    refused(lambda: sparse(model, optimizer, "sr_ste"), "ZeroRedundancyOptimizer leaves the dense")
    return {(*case, how): ddp(*case, how) for case in [*CASES, *DRAWN] for how in WAYS}


# --- sharded -------------------------------------------------------------------------------------


def sharded(recipe: str, name: str) -> Started:
    """Sharded as FSDP2's users do."""
    model = net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, sparse(model, optimizer, recipe)


def fsdp(
    recipe: str,
    optimizer: str,
    folder: Path,
    sharded: Callable[[str, str], Started] = sharded,
    step: Callable[[nn.Module, torch.optim.Optimizer, int], None] = step,
) -> dict[str, Tensor]:
    """To the end; and saved on the way, loaded into another, and to the same end."""
    started = sharded(recipe, optimizer)
    for number in range(TOTAL):
        if number == STOP:
            save(started, folder)
        step(*started[:2], number)
        parts = [w for w in started[2].sparse if w.is_sharded]
        assert parts
        assert all(w.dense.numel() < w.shape.numel() or w.shape[0] == 1 for w in parts)
    weights = outcome(*started)
    same_everywhere(weights, (recipe, optimizer))
    for load in (from_files, from_whole):
        if load is from_whole and (recipe, optimizer) == ("asp", "plain sgd"):
            continue  # torch loads no whole state dict where there is no state at all
        again = sharded(recipe, optimizer)
        if load is from_files and recipe in ("asp", "step", "mdgf_linear"):
            # saved in the sparse phase; what is loaded into has no room for its tensors
            broken(lambda again=again: from_files(again, folder))
            again = sharded(recipe, optimizer)
            again[2].make_room(dcp.FileSystemReader(folder).read_metadata())
        load(again, folder)
        assert again[2].recipe.step == STOP
        for number in range(STOP, TOTAL):
            step(*again[:2], number)
        ended = outcome(*again)
        assert ended.keys() == weights.keys(), (recipe, optimizer, load)
        for name, tensor in weights.items():
            assert torch.equal(ended[name], tensor), (recipe, optimizer, load, name)
    return weights


def save(started: Started, folder: Path) -> None:
    """By torch.distributed.checkpoint in parts, and whole in one file."""
    model, optimizer, handle = started
    clock = handle.recipe.step
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    both = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(both, folder / "whole.pt")
    dist.barrier()
    assert handle.recipe.step == clock


def from_files(started: Started, folder: Path) -> None:
    model, optimizer, _ = started
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )


def from_whole(started: Started, folder: Path) -> None:
    model, optimizer, _ = started
    both = torch.load(folder / "whole.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    states = {"model_state_dict": both[0], "optim_state_dict": both[1]}
    set_state_dict(model, optimizer, **states, options=options)


def in_shards(folder: Path) -> dict[Any, dict[str, Tensor]]:
    """Every case; saving an optimizer that has not begun; and what is refused."""
    outcomes = {}
    for number, case in enumerate([*CASES, ("sr_ste", "plain sgd"), ("asp", "plain sgd")]):
        place = folder / f"saved{number}"
        place.mkdir(exist_ok=True)
        outcomes[case] = fsdp(*case, place)
    for recipe, options in (
        ("t_sr_ste", {}),
        ("bi_mask", {}),
        ("lbc", {}),
        ("maskllm", {}),
        ("slope", {}),
        ("asp", {"permute": True}),
        ("sr_ste", {"input_gradient": "transposable"}),
        ("sr_ste", {"input_gradient": "double_prune"}),
    ):
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
        fully_shard(model)
        optimizer = nmrun.optim.AdamW(model.parameters())
        before = copy.deepcopy(optimizer.state_dict())
        refused(
            lambda: nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, exclude=(), **options),  # noqa: B023
            "looks across the rows of a weight",
        )
        assert optimizer.state_dict() == before
    check_dense_weights()
    for split, complaint in ((True, "not a multiple of 8 in each"), (False, "not sharded over")):
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ignored = set() if split else {model[1].weight}
        fully_shard(
            model,
            mesh=mesh,
            ignored_params=ignored,
            shard_placement_fn=lambda p: Shard(int(p.dim() == 2 and split)),  # noqa: B023
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refused(
            lambda: nmrun.sparsify(model, optimizer, "sr_ste", "2:8", TOTAL, exclude=None),  # noqa: B023
            complaint,
        )
    return outcomes


# --- layers in parts (tensor parallelism) --------------------------------------------------------


def in_tensor_parallel(folder: Path) -> dict[Any, dict[str, Tensor]]:
    """Every recipe, also where two layers are whole in each process; and a weight whose parts are no
    whole groups."""
    outcomes: dict[Any, dict[str, Tensor]] = {}
    for number, recipe in enumerate(RECIPES):
        for plan in ("all", "some"):
            place = folder / f"parts{number}{plan}"
            place.mkdir(exist_ok=True)
            make = functools.partial(in_parts, mixed=plan == "some")
            outcomes[recipe, plan] = fsdp(recipe, "adamw", place, make, whole_step)
    model, _, _ = in_parts("step", "adamw", attach=False, mixed=True)
    outcomes["measured"] = measured(model)
    model, optimizer, _ = in_parts("asp", "adamw", attach=False)
    refused(
        lambda: nmrun.sparsify(model, optimizer, "sr_ste", "2:16", TOTAL, exclude=None),
        "not a multiple of 16 in each",
    )
    return outcomes


def in_parts(recipe: str, name: str, attach: bool = True, mixed: bool = False) -> Started:
    model = pairs()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    more = {} if mixed else {"3": ColwiseParallel(), "5": RowwiseParallel()}
    parallelize_module(model, mesh, {**kinds, **more})
    optimizer = OPTIMIZERS[name](model.parameters())
    handle: Any = sparse(model, optimizer, recipe) if attach else None
    return model, optimizer, handle


def check_dense_weights() -> None:
    """Dense evaluation after one with sparse weights, whose gathered weights FSDP has kept."""
    model, same = net(), net()
    fully_shard(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    handle = sparse(model, optimizer, "sr_ste")
    x, dense, outputs = torch.ones(2, 16), same(torch.ones(2, 16)), []
    with torch.no_grad():
        outputs.append(model(x))
        with handle.dense_weights():
            assert torch.equal(model(x), dense)
        outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], dense)
    step(model, optimizer, 0)
    with torch.no_grad():
        model(x)
    handle.finalize()


def refused(call: Callable[[], object], complaint: str) -> None:
    try:
        call()
    except ConfigError as error:
        assert complaint in str(error), error  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        raise AssertionError(complaint)


def broken(call: Callable[[], object]) -> None:
    try:
        call()
    except (ConfigError, dcp.api.CheckpointException) as error:
        message = str(error)
        assert "no dense weight" in message or "Missing key" in message, message
    else:
        raise AssertionError("a state without its dense weights was taken")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "ddp":
        outcomes = replicated()
    else:
        outcomes = in_shards(folder) if kind == "fsdp" else in_tensor_parallel(folder)
    if dist.get_rank() == 0:
        torch.save(outcomes, folder / f"{kind}.pt")
    dist.barrier()
    dist.destroy_process_group()
