"""A small multilayer perceptron for tests of its products, and what it learns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from operands import normal
from torch import Tensor, nn

from nmrun import optim, sparsify
from nmrun.sparsity import nm_mask


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    )


def start(recipe: str, pattern: str = "2:4", **options: Any) -> tuple[nn.Sequential, Any, Any]:
    """The network with all of its weights sparse, its optimizer and its handle; of eight steps."""
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    options = {"exclude": None, "total_steps": 8, **options}
    return model, optimizer, sparsify(model, optimizer, recipe, pattern, **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """70 tokens and their classes."""
    x = normal(70, 36, seed=step)
    return x, x.abs().argmax(1) % 10


def train(
    model: Callable[[Tensor], Tensor],
    optimizer: Any,
    steps: range = range(8),
    parts: int = 2,
    low: bool = False,
) -> list[float]:
    """The losses of steps of so many micro-batches; ``low`` is autocast to bfloat16."""
    losses = []
    for step in steps:
        for part in range(parts):
            x, target = batch(10 * step + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = F.cross_entropy(model(x), target)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def resumes(begin: Callable[[], tuple[nn.Module, Any]], low: bool = False) -> None:
    """A run that is cut off after five of eight steps ends with the bits of one left alone."""
    (whole, optimizer), (first, early), (second, late) = begin(), begin(), begin()
    losses = train(whole, optimizer, low=low)
    cut = train(first, early, range(5), low=low)
    for part, saved in ((second, first), (late, early)):
        part.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert cut + train(second, late, range(5, 8), low=low) == losses
    assert all(map(torch.equal, whole.parameters(), second.parameters()))


def pruned(pattern: str = "1:4") -> nn.Sequential:
    """80 to 50 to 30, with weights by a pattern, in evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 50), nn.ReLU(), nn.Linear(50, 30, bias=False))
    for layer in (model[0], model[2]):
        layer.weight.data *= nm_mask(layer.weight.data, pattern, 1, pad=True)
    return model.eval()
