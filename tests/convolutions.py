"""A small convolutional network for tests of its products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
