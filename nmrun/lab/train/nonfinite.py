"""Where a NaN or an infinity first appeared, for the message of a run that has to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from nmrun.lab.tasks.base import Batch, Loss


def culprit(
    model: nn.Module,
    loss_of: Loss,
    batches: list[Batch],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Find the first non-finite value on the way through one batch.

    It is the input, a parameter, a layer's output or a gradient.
    """
    for batch in batches:
        if not all(is_finite(tensor) for tensor in batch):
            return "the batch itself"
    if names := broken(model):
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"parameter {names[0]}{others} (an earlier update broke it)"
    model.zero_grad()
    outputs: list[str] = []
    hooks = [
        module.register_forward_hook(_recorder(name, outputs))
        for name, module in model.named_modules()
        if name
    ]
    try:
        for batch in batches:
            with autocast():
                loss = loss_of(model, batch)
            if outputs:
                return f"the output of {outputs[0]}"
            if not is_finite(loss):
                return "the loss itself, of finite outputs"
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    backwards = [
        name
        for name, p in reversed(list(model.named_parameters()))
        if p.grad is not None and not is_finite(p.grad)
    ]
    return f"the gradient of {backwards[0]}" if backwards else "not found again in a second pass"


def broken(model: nn.Module) -> list[str]:
    """The names of parameters and buffers that are not finite. Of shards all ranks have to ask."""
    return [name for name, tensor in _named_tensors(model) if not is_finite(tensor)]


def _recorder(name: str, found: list[str]) -> Any:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        if not all(is_finite(t) for t in tree_iter(output) if isinstance(t, Tensor)):
            found.append(f"{name} ({type(module).__name__})")

    return record


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity; whole numbers have none."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
