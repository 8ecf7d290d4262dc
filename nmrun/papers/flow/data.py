"""Frames with optical flow: Sintel and FlyingChairs, read by torchvision, and generated pairs."""

from __future__ import annotations

import math
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.items import Split, in_order
from nmrun.papers.flow.keys import FlyingChairs, GeneratedMotion, Sintel
from nmrun.papers.flow.task import FlowTask

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config


HOW = {
    "Sintel": "unpack sintel.is.tue.mpg.de's MPI-Sintel-complete there: training/clean, training/final, training/flow",
    "FlyingChairs": "unpack FlyingChairs there (lmb.informatik.uni-freiburg.de): data, FlyingChairs_train_val.txt",
}


def sintel(config: Config, device: torch.device) -> FlowTask:
    """Sintel (Butler et al. 2012). The flow of its test frames is not public, so whole scenes of
    its training frames are for validation and test.
    """
    options = config.dataset.as_kind(Sintel)
    frames = _read("sintel", "Sintel", options.path, split="train", pass_name=options.rendering)
    scene_of = {row: Path(pair[0]).parent.name for row, pair in enumerate(frames._image_list)}
    rows = sorted(scene_of, key=lambda row: frames._image_list[row])  # it lists them in no order
    scenes = sorted(set(scene_of.values()))
    random.Random(options.split_seed).shuffle(scenes)
    val, test = (
        math.ceil(share * len(scenes)) for share in (options.val_fraction, options.test_fraction)
    )
    if val + test >= len(scenes):
        raise ConfigError(
            f"dataset.val_fraction={options.val_fraction} and dataset.test_fraction="
            f"{options.test_fraction}: of {len(scenes)} scenes that leaves none for training"
        )
    parts = {"train": scenes[val + test :], "val": scenes[:val], "test": scenes[val : val + test]}
    splits = {
        name: Split(frames, [row for row in rows if scene_of[row] in part])
        for name, part in parts.items()
    }
    return FlowTask(config, splits, device, _about("Sintel", splits), options.workers)


def flying_chairs(config: Config, device: torch.device) -> FlowTask:
    """FlyingChairs (Dosovitskiy et al. 2015). Its validation pairs are the test here, as is usual,
    and pairs are held out of those for training for validation.
    """
    options = config.dataset.as_kind(FlyingChairs)
    pool, test = (
        _read("flying_chairs", "FlyingChairs", options.path, split=name)
        for name in ("train", "val")
    )
    rows = list(range(len(pool)))
    random.Random(options.split_seed).shuffle(rows)
    cut = len(rows) - math.ceil(options.held_out * len(rows))
    if cut < 1:
        raise ConfigError(
            f"dataset.held_out={options.held_out}: of {len(rows)} pairs that leaves none for training"
        )
    splits = {
        "train": Split(pool, rows[:cut]),
        "val": Split(pool, rows[cut:]),
        "test": Split(test, list(range(len(test)))),
    }
    return FlowTask(config, splits, device, _about("FlyingChairs", splits), options.workers)


def _read(dataset: str, folder: str, path: str | None, **options: Any) -> Any:
    """torchvision's data set of this name. Raises ConfigError for files that are missing."""
    from torchvision import datasets

    name = folder if path is None else str(Path(path) / folder)
    place = storage.find(dataset, [name], HOW[folder])
    try:
        frames = getattr(datasets, folder)(str(place.parent), **options)
    except (OSError, IndexError, ValueError) as error:
        raise ConfigError(f"dataset={dataset}: {place}: {error}; {HOW[folder]}") from None
    pairs, flows = frames._image_list, frames._flow_list
    if not pairs:
        raise ConfigError(f"dataset={dataset}: {place} has no frames; {HOW[folder]}")
    if len(pairs) != len(flows):
        raise ConfigError(
            f"dataset={dataset}: {place} has {len(pairs)} pairs of frames and {len(flows)} files of flow"
        )
    for (first, _), flow in zip(pairs, flows, strict=True):
        if Path(first).stem.replace("img1", "flow") != Path(flow).stem:
            raise ConfigError(
                f"dataset={dataset}: {first} has no flow: {flow} is where it should be"
            )
    return frames


def _about(name: str, splits: dict[str, Split]) -> str:
    counts = ", ".join(f"{len(split.rows):,} {part}" for part, split in splits.items())
    return f"pairs of frames of {name} ({counts})"


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


def generated_motion(config: Config, device: torch.device) -> FlowTask:
    options = config.dataset.as_kind(GeneratedMotion)
    side = options.resolution
    splits = generated(options.size, side, options.split_seed)
    return FlowTask(config, splits, device, f"generated pairs of frames of {side}x{side}")


@cache
def generated(size: int = 64, resolution: int = 128, split_seed: int = 0) -> dict[str, Split]:
    """Pairs of frames by split: a texture moves, and a square of another one in front of it moves
    elsewhere. ``size`` are for training, and 8 for each other split.
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
