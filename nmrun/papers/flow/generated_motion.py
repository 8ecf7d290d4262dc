"""A generated data set that needs no download: a texture that moves, and a square of another one in
front of it that moves elsewhere.

It shows that training works, and nothing about films.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.lab.tasks.items import Split, in_order
from nmrun.papers.flow.keys import GeneratedMotion
from nmrun.papers.flow.task import FlowTask

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config

HELD_OUT = 8  # pairs for validation, and as many for the test
FARTHEST = 8  # pixels that something moves along a side


class Moved:
    """Generated pairs, as torchvision's data sets have those of files."""

    def __init__(self, count: int, side: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.pairs = [_pair(random, side) for _ in range(count)]

    def __getitem__(self, row: int, /) -> Any:
        from PIL import Image

        first, second, flow = self.pairs[row]
        return Image.fromarray(first), Image.fromarray(second), flow


def build(config: Config, device: torch.device) -> FlowTask:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    options = config.dataset.as_kind(GeneratedMotion)
    side = options.resolution
    splits = load(options.size, side, options.split_seed)
    return FlowTask(config, splits, device, f"generated pairs of frames of {side}x{side}")


@cache
def load(size: int = 64, resolution: int = 128, split_seed: int = 0) -> dict[str, Split]:
    """Generate pairs of frames.

    Args:
        size: of the training split; each of the others has 8 pairs.

    Returns:
        The splits ``train``, ``val`` and ``test``.
    """
    moved = Moved(size + 2 * HELD_OUT, resolution, split_seed)
    return in_order(moved, size, HELD_OUT)


def _pair(
    random: np.random.Generator, side: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """Both frames (side, side, 3), and the flow (2, side, side): a pixel at p is at p + flow."""
    behind, front = (_texture(random, side + 2 * FARTHEST) for _ in range(2))
    moves = random.integers(-FARTHEST, FARTHEST + 1, (2, 2))  # of both, x before y
    width = int(random.integers(side // 4, side // 2))
    corner = random.integers(FARTHEST, side - FARTHEST - width, 2)
    frames = []
    for time in (0, 1):
        left, top = FARTHEST - time * moves[0]
        frame = behind[top : top + side, left : left + side].copy()
        left, top = corner + time * moves[1]
        frame[top : top + width, left : left + width] = front[:width, :width]
        frames.append(frame)
    flow = np.empty((2, side, side), np.float32)
    flow[:] = moves[0][:, None, None]
    x, y = corner
    flow[:, y : y + width, x : x + width] = moves[1][:, None, None]
    return frames[0], frames[1], flow


def _texture(random: np.random.Generator, side: int) -> NDArray[np.uint8]:
    """Coarse and fine noise, (side, side, 3)."""
    coarse = random.integers(0, 156, (-(-side // 8), -(-side // 8), 3))
    coarse = coarse.repeat(8, 0).repeat(8, 1)[:side, :side]
    return (coarse + random.integers(0, 100, (side, side, 3))).astype(np.uint8)
