"""A small convolutional network for tests of its products, what it learns, and geometries."""

from __future__ import annotations

from typing import Any

import torch
from operands import normal
from torch import Tensor, nn

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


def batch(step: int, images: int = 70) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    x = normal(images, 8, 9, 7, seed=step)
    return x, 3 * x[:, :4].mean((2, 3)).argmax(1) % 4
