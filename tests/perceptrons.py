"""A small multilayer perceptron for tests of its products, and what it learns."""

from __future__ import annotations

import torch
from operands import normal
from torch import Tensor, nn


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """70 tokens and their classes."""
    x = normal(70, 36, seed=step)
    return x, x.abs().argmax(1) % 10
