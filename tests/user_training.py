"""The training of a user's own script, in one process or several, for user_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import nmrun
from nmrun.sparsity.metrics import layer_metrics
from nmrun.step.handle import Handle

TOTAL, STOP = 8, 5
RECIPES: dict[str, dict[str, Any]] = {
    "sr_ste": {"decay": 0.1},
    "step": {"switch": 0.5, "decay": 0.1},
    "asp": {"prune_at": 0.5},
    "s_ste": {},
    "mdgf_linear": {"dense": 0.25},
}
# recipes that draw random numbers; in shards they are refused
DRAWING: dict[str, dict[str, Any]] = {
    "bi_mask": {"interval": 3, "candidates": 5},
    "slope": {"mask": "random"},
    "sqft": {"rank": 2},
    "maskllm": {"dense": 0.25},
}
DRAWN = [(recipe, "adamw") for recipe in DRAWING]
CASES = [(r, o) for r in RECIPES for o in ("sgd", "adamw", "fused") if (r, o) != ("step", "sgd")]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: nmrun.optim.AdamW(parameters, lr=0.01, eps=1e-4),
    "fused": lambda parameters: nmrun.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True),
}
Started = tuple[nn.Module, torch.optim.Optimizer, Handle]


def net(seed: int = 0) -> nn.Sequential:
    """The last layer has one output: of two processes one has nothing of its weight."""
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 12), nn.Linear(12, 16), nn.Linear(16, 7, bias=False)]
    return nn.Sequential(*layers[:2], nn.Tanh(), layers[2], nn.Linear(7, 8), nn.Linear(8, 1))


def pairs() -> nn.Sequential:
    """Twice two layers, of which tensor parallelism cuts the first by outputs, the second by inputs."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)]
    tanh = nn.Tanh()
    return nn.Sequential(layers[0], tanh, *layers[1:3], tanh, layers[3]).double()


def sparse(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str) -> Handle:
    """The call that every case makes."""
    options = {"exclude": None, **(RECIPES | DRAWING)[recipe]}
    return nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, parts: int = 1) -> None:
    """One step with this rank's share of a batch, in ``parts`` micro-batches."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    shares = batch.chunk(ranks)[rank].chunk(parts)
    for i, share in enumerate(shares):
        last = i + 1 == len(shares)
        if not last and isinstance(model, DistributedDataParallel):
            with model.no_sync():
                (model(share).square().mean() / parts).backward()
        else:
            (model(share).square().mean() / parts).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step with the same batch on every rank."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).double()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    full = tensor.detach()
    return (full.full_tensor() if isinstance(full, DTensor) else full).clone()


def outcome(
    model: nn.Module, optimizer: torch.optim.Optimizer, handle: Handle
) -> dict[str, Tensor]:
    """All that was trained: parameters, dense weights, moments; then finished and N:M."""
    tensors = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("module.")
        tensors[plain] = whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{plain} {key}"] = whole(value)
    names = [(weight.name.removeprefix("module."), weight) for weight in handle.sparse]
    assert len(names) == 4
    handle.finalize()
    for name, weight in names:
        left = weight.whole(weight.weight)
        nmrun.sparsity.check_nm(left, "2:4", 1)
        assert torch.equal(left, tensors[name])
    return tensors


def measured(model: nn.Module, number: int = 3) -> dict[str, Tensor]:
    """What AutoSwitch and the metrics of masks sum over all weights, after so many steps."""
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    options = {"switch": "auto", "window": "partial", "t_min": 0.5, "exclude": None}
    handle = nmrun.sparsify(model, optimizer, "step", "2:4", 100, **options)
    for step in range(number):
        handle.measure_flips = True
        whole_step(model, optimizer, step)
    return {
        key: torch.tensor(value)
        for each in (handle.metrics(), layer_metrics(handle.sparse, handle.recipe))
        for key, value in each.items()
    }


def alone(
    recipe: str,
    name: str,
    net: Callable[[], nn.Module] = net,
    step: Callable[[nn.Module, torch.optim.Optimizer, int], None] = step,
) -> dict[str, Tensor]:
    """In one process."""
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    handle = sparse(model, optimizer, recipe)
    for number in range(TOTAL):
        step(model, optimizer, number)
    return outcome(model, optimizer, handle)


def same_everywhere(tensors: dict[str, Tensor], what: Any) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensors)
    for other in everyone:
        assert other.keys() == tensors.keys(), what
        for name, tensor in tensors.items():
            assert torch.equal(other[name], tensor), (what, name)
