"""A small network, trained by any recipe, and all its state as bits: for tests of the handle."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import nmrun
from nmrun.recipes import RECIPES
from nmrun.step.handle import Handle

# torch's optimizers, but for Adagrad, whose states are never empty
KINDS = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"]
KINDS += ["RMSprop", "Rprop", "ASGD", "Adadelta", "Adafactor"]
TOTAL = 10
OPTIONS: dict[str, dict[str, Any]] = {
    "sdgf_geometric": {"frames": 2},
    "mdgf_linear": {"dense": 0.0},
    "t_sr_ste": {"interval": 3, "decay": 0.1},
    "step": {"switch": 0.5, "decay": 0.1},
    "bi_mask": {"interval": 3, "candidates": 5, "decay": 0.1},
    "sr_ste": {"decay": 0.1},
    "sqft": {"rank": 2},
    "ste_periodic": {"interval": 4, "gradient": "masked"},
}
SPARSE = [name for name in RECIPES if name != "dense"]
Start = tuple[nn.Sequential, torch.optim.Optimizer, Handle]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: y = x W + b, with W stored as (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def by_sgd(
    model: nn.Module,
    recipe: Any,
    pattern: str = "2:4",
    total: int | None = None,
    lr: float = 0.1,
    **options: Any,
) -> tuple[torch.optim.Optimizer, Handle]:
    """All weights that can be are sparse, unless told otherwise; plain SGD trains them."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    options = {"exclude": None, **options}
    return optimizer, nmrun.sparsify(model, optimizer, recipe, pattern, total, **options)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: str,
    pattern: str = "2:4",
    **options: Any,
) -> Handle:
    settings = {"exclude": "4", **OPTIONS.get(recipe, {}), **options}
    return nmrun.sparsify(model, optimizer, recipe, pattern, TOTAL, **{"exclude": None, **settings})


def start(recipe: str, seed: int = 0, pattern: str = "2:4", **options: Any) -> Start:
    model = net(seed)
    fused = options.pop("fused", False)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    return model, optimizer, attach(model, optimizer, recipe, pattern, **options)


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    handle: Handle | None = None,
) -> None:
    """With a handle, every other step is measured."""
    for step in steps:
        if handle is not None:
            handle.measure_flips = step % 2 == 0
        x = batch(step).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(value: Any) -> Any:
    """A copy that equals another only if each of its tensors does, in every bit, under its key."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def everything(
    model: nn.Module, optimizer: torch.optim.Optimizer, handle: Handle | None = None
) -> dict[str, Any]:
    """All that a loop would save, and the weights in use."""
    saved = {"model": bits(model.state_dict()), "optimizer": bits(optimizer.state_dict())}
    saved["keys"] = list(model.state_dict())
    if handle is not None:
        saved["used"] = bits([w.weight for w in handle.sparse])
    return saved


def stored(*parts: Any) -> list[Any]:
    """The state dicts of these, without handles, through a file without pickle."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts if not isinstance(part, Handle)], file)
    file.seek(0)
    states: list[Any] = torch.load(file, weights_only=True)
    return states


def recipe_tensors(optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """The tensors that are in the optimizer's state because of nmrun, by name."""
    tensors: dict[str, list[Tensor]] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if key.startswith("nmrun_"):
                tensors.setdefault(key.removeprefix("nmrun_"), []).append(value)
    return tensors
