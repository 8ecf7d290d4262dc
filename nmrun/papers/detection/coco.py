"""COCO (Lin et al. 2014, arXiv 1405.0312), and other data sets in its format: folders of images,
and for each a file of annotations, ``annotations/instances_<folder>.json``.

The labels of COCO's test images are not public, so ``val2017`` is the test here, as is usual, and
images are held out of those for training for validation.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.items import Split
from nmrun.papers.detection.instances import api, learned, quiet
from nmrun.papers.detection.keys import Coco

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.papers.detection.instances import Pictures
    from nmrun.papers.detection.task import Detection

HOW = (
    "dataset.path is a folder with folders of images and annotations/instances_<folder>.json"
    " (cocodataset.org)"
)


def build(config: Config, device: torch.device) -> Detection:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    from nmrun.papers.detection.task import Detection

    options = config.dataset.as_kind(Coco)
    splits = load(options)
    counts = ", ".join(f"{len(split.rows):,} {name}" for name, split in splits.items())
    about = (
        f"images with instances of {len(splits['train'].source.coco.cats)} categories ({counts})"
    )
    return Detection(config, splits, device, about, options.workers)


def load(options: Coco) -> dict[str, Split]:
    """Read both files of annotations, and split the first.

    Returns:
        The splits ``train``, ``val`` and ``test``; training images without an instance are left
        out.

    Raises:
        ConfigError: for files that are missing or not as they should be.
    """
    api("coco")
    place = storage.find("coco", [options.path], HOW)
    pool, test = (read(place, name) for name in (options.train, options.test))
    if pool.coco.cats.keys() != test.coco.cats.keys():
        odd = sorted(pool.coco.cats.keys() ^ test.coco.cats.keys())[0]
        raise ConfigError(
            f"dataset=coco: {options.train} and {options.test} have not the same categories, for instance {odd}"
        )
    rows = list(range(len(pool.ids)))
    random.Random(options.split_seed).shuffle(rows)
    cut = len(rows) - math.ceil(options.held_out * len(rows))
    there = [row for row in rows[:cut] if any(map(learned, pool.coco.imgToAnns[pool.ids[row]]))]
    if not there or not rows[cut:]:
        raise ConfigError(
            f"dataset.held_out={options.held_out}: of {len(rows)} images in {place / options.train} "
            f"that leaves {len(there)} with an instance for training and {len(rows[cut:])} for validation"
        )
    return {
        "train": Split(pool, there[: options.limit]),
        "val": Split(pool, rows[cut:]),
        "test": Split(test, list(range(len(test.ids)))),
    }


def read(place: Path, name: str) -> Pictures:
    """Read a folder of images and its annotations.

    Raises:
        ConfigError: for a file that is missing, and annotations that are none of instances.
    """
    from torchvision.datasets import CocoDetection

    folder, file = place / name, place / "annotations" / f"instances_{name}.json"
    for path in (folder, file):
        if not path.exists():
            raise ConfigError(f"dataset=coco: there is no {path}: {HOW}")
    try:
        with quiet():
            pictures = CocoDetection(str(folder), str(file))
        problem = next(_problems(pictures.coco, folder), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        problem = f"no annotations of COCO: {type(error).__name__} {error}"
    if problem:
        raise ConfigError(f"{file}: {problem}")
    return pictures


def _problems(coco: Any, folder: Path) -> Iterator[str]:
    """What makes annotations unusable, a line each."""
    for part in ("images", "categories", "annotations"):
        if not coco.dataset.get(part):
            yield f"it has no {part}"
    for number, annotation in coco.anns.items():
        if annotation["image_id"] not in coco.imgs:
            yield f"annotation {number}: there is no image {annotation['image_id']}"
        if annotation["category_id"] not in coco.cats:
            yield f"annotation {number}: there is no category {annotation['category_id']}"
        if len(annotation["bbox"]) != 4:
            yield f"annotation {number}: its bbox is {annotation['bbox']}"
        for key in ("area", "iscrowd"):  # by which COCO's evaluation divides instances
            if key not in annotation:
                yield f"annotation {number} has no {key}"
        if not annotation.get("segmentation"):
            yield f"annotation {number} has no segmentation, from which masks are learned"
    names = {str(image["file_name"]) for image in coco.imgs.values()}
    tall = [name for name in coco.imgs if not {"height", "width"} <= coco.imgs[name].keys()]
    if tall:
        yield f"image {tall[0]} has no height and width"
    with os.scandir(folder) as entries:
        missing = sorted(names - {entry.name for entry in entries})
    missing = [name for name in missing if not (folder / name).exists()]  # in folders of their own
    if missing:
        yield f"{len(missing)} of {len(names)} images are not in {folder}, for instance {missing[0]}"
