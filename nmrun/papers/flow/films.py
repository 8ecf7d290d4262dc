"""Frames with optical flow on the disk, read by torchvision: Sintel (Butler et al. 2012) and
FlyingChairs (Dosovitskiy et al. 2015).

The flow of Sintel's test frames is not public, so whole scenes of its training frames are for
validation and test. The validation pairs of FlyingChairs are the test here, as is usual, and pairs
are held out of those for training for validation.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.items import Split
from nmrun.papers.flow.keys import FlyingChairs, Sintel
from nmrun.papers.flow.task import FlowTask

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config

HOW = {
    "Sintel": "unpack sintel.is.tue.mpg.de's MPI-Sintel-complete there: training/clean, training/final, training/flow",
    "FlyingChairs": "unpack FlyingChairs there (lmb.informatik.uni-freiburg.de): data, FlyingChairs_train_val.txt",
}


def sintel(config: Config, device: torch.device) -> FlowTask:
    """Build the task of ``dataset=sintel``, as :func:`nmrun.lab.tasks.build` says."""
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
        name: Split(frames, [row for row in rows if scene_of[row] in some])
        for name, some in parts.items()
    }
    return FlowTask(config, splits, device, _about("Sintel", splits), options.workers)


def flying_chairs(config: Config, device: torch.device) -> FlowTask:
    """Build the task of ``dataset=flying_chairs``, as :func:`nmrun.lab.tasks.build` says."""
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

    asked = folder if path is None else str(Path(path) / folder)
    place = storage.find(dataset, [asked], HOW[folder])
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
