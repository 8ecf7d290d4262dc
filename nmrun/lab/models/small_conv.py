"""A small convolutional net for small images: 3x3 convolutions with ReLU, with or without batch
normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class SmallConvNetwork(nn.Module):
    """Convolutions ``stem``, ``inner.0``, ... and a linear ``head``.

    ``stem`` goes from the image to ``channels[0]``, ``inner.i`` from ``channels[i]`` to
    ``channels[i + 1]``. A 2x2 max pooling follows each inner convolution while the map is larger
    than 2x2. Input (B, C, H, W), output (B, classes) logits.

    Args:
        shape: (C, H, W).
        batch_norm: whether batch normalisation follows each of them, before the ReLU.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        channels: Sequence[int],
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        colours, height, width = shape
        self.stem = nn.Conv2d(colours, channels[0], 3, padding=1)
        self.inner = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (channels if batch_norm else ()))
        self.pooled = 0
        while self.pooled < len(self.inner) and min(height, width) > 2:
            height, width, self.pooled = height // 2, width // 2, self.pooled + 1
        self.head = nn.Linear(channels[-1] * height * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self._normed(0, self.stem(x)).relu()
        for index, conv in enumerate(self.inner):
            x = self._normed(index + 1, conv(x)).relu()
            if index < self.pooled:
                x = nn.functional.max_pool2d(x, 2)
        return self.head(x.flatten(1))

    def _normed(self, index: int, x: Tensor) -> Tensor:
        return self.norms[index](x) if self.norms else x


def build(shape: tuple[int, ...], classes: int, channels: Sequence[int]) -> SmallConvNetwork:
    """Build the convolutional net.

    Args:
        shape: (channels, height, width) of the images.
        channels: the channels of the stem and of the inner convolutions.
    """
    return SmallConvNetwork(shape, classes, channels)


def build_normed(shape: tuple[int, ...], classes: int, channels: Sequence[int]) -> SmallConvNetwork:
    """Build it with batch normalisation."""
    return SmallConvNetwork(shape, classes, channels, batch_norm=True)
