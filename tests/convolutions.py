"""A small convolutional network for tests of its products, what it learns, and geometries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from operands import normal, under_autocast
from torch import Tensor, nn

from nmrun import Handle, accelerate, optim, sparsify
from nmrun.fast.measurement import Choice
from nmrun.sparsity import nm_mask

# images, channels, out channels, (height, width), taps, stride, padding, dilation
GEOMETRIES = [
    (1, 1, 1, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
    (3, 5, 7, (6, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    (17, 20, 33, (9, 7), (3, 3), (2, 2), (1, 1), (1, 1)),
    (5, 4, 8, (8, 8), (1, 1), (2, 2), (0, 0), (1, 1)),
]


def net(**options: Any) -> nn.Sequential:
    """Convolutions of 8 channels to 4 classes; ``options`` are those of the first."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, **options),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(24, 24, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """70 images and their classes."""
    x = normal(70, 8, 9, 7, seed=step)
    return x, 3 * x[:, :4].mean((2, 3)).argmax(1) % 4


def train(
    mode: str, recipe: str, pattern: str, low: bool = False, **options: Any
) -> tuple[Handle, list[Choice], list[float]]:
    """The convolutions trained in ten steps, and their losses; ``low`` is autocast to bfloat16."""
    model = net()
    optimizer = optim.AdamW(model.parameters(), 3e-2)
    handle = sparsify(model, optimizer, recipe, pattern, exclude=["7"], total_steps=10, **options)
    x, _ = batch(0)
    choices = accelerate(handle, under_autocast(model, x) if low else lambda: model(x), mode)
    losses = []
    for step in range(10):
        x, target = batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return handle, choices, losses


def prune(model: nn.Module, pattern: str) -> nn.Module:
    """The model, in evaluation mode, with weights of convolutions by a pattern along their inputs."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data *= nm_mask(module.weight.data, pattern, 1, pad=True)
    return model.eval()
