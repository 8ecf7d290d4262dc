"""A perceptron over the raw pixels.

Some pixels of digits are 0 in every image, so some weights never get a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLPNetwork(nn.Module):
    """Linear ``stem``, ``inner.0``, ... and ``head``, with ReLU between.

    ``stem`` goes from pixels to ``hidden[0]``, ``inner.i`` from ``hidden[i]`` to ``hidden[i + 1]``.
    Input (B, C, H, W), output (B, classes) logits.

    Args:
        shape: (C, H, W).
    """

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Linear(math.prod(shape), hidden[0])
        self.inner = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(hidden))
        self.head = nn.Linear(hidden[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1)).relu()
        for layer in self.inner:
            x = layer(x).relu()
        return self.head(x)


def build(shape: tuple[int, ...], classes: int, hidden: Sequence[int]) -> MLPNetwork:
    """Build the perceptron.

    Args:
        shape: (channels, height, width) of the images.
        hidden: the widths of the hidden layers, one or more.
    """
    return MLPNetwork(shape, classes, hidden)
