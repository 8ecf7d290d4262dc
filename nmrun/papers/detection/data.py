"""Images with instances: COCO and data sets in its format, and generated shapes."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.items import Split, in_order
from nmrun.papers.detection.keys import Coco, GeneratedShapes
from nmrun.papers.detection.task import api, learned, quiet

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.papers.detection.task import Detection, Pictures


HOW = (
    "dataset.path is a folder with folders of images and annotations/instances_<folder>.json"
    " (cocodataset.org)"
)


def coco(config: Config, device: torch.device) -> Detection:
    from nmrun.papers.detection.task import Detection

    options = config.dataset.as_kind(Coco)
    splits = load_coco(options)
    counts = ", ".join(f"{len(split.rows):,} {name}" for name, split in splits.items())
    about = (
        f"images with instances of {len(splits['train'].source.coco.cats)} categories ({counts})"
    )
    return Detection(config, splits, device, about, options.workers)


def load_coco(options: Coco) -> dict[str, Split]:
    """The splits of COCO (Lin et al. 2014, arXiv 1405.0312), or of data in its format.

    The labels of COCO's test images are not public, so ``val2017`` is the test here, as is usual.
    Images are held out of those for training for validation; training images without an instance
    are left out. Raises ConfigError for files that are missing or not as they should be.
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
    with_instances = [
        row for row in rows[:cut] if any(map(learned, pool.coco.imgToAnns[pool.ids[row]]))
    ]
    if not with_instances or not rows[cut:]:
        raise ConfigError(
            f"dataset.held_out={options.held_out}: of {len(rows)} images in {place / options.train} "
            f"that leaves {len(with_instances)} with an instance for training and {len(rows[cut:])} for validation"
        )
    return {
        "train": Split(pool, with_instances[: options.limit]),
        "val": Split(pool, rows[cut:]),
        "test": Split(test, list(range(len(test.ids)))),
    }


def read(place: Path, name: str) -> Pictures:
    """A folder of images and its annotations. Raises ConfigError for a file that is missing, and
    annotations that are none of instances.
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


SHAPES = ("disc", "square", "triangle")
HELD_OUT = 24  # images for validation, and as many for the test
LEAST = 0.25  # of what is seen of a shape that another one may not hide


class Shapes:
    """Images (N, side, side, 3) uint8 in memory, as torchvision's CocoDetection has those of files."""

    def __init__(self, images: NDArray[np.uint8], dataset: dict[str, Any]) -> None:
        self.images, self.coco = images, api("generated_shapes").coco.COCO()
        self.coco.dataset = dataset
        with quiet():
            self.coco.createIndex()
        self.ids = sorted(self.coco.imgs)

    def __getitem__(self, row: int, /) -> tuple[Any, list[dict[str, Any]]]:
        from PIL import Image

        return Image.fromarray(self.images[row]), self.coco.imgToAnns[self.ids[row]]


def generated_shapes(config: Config, device: torch.device) -> Detection:
    from nmrun.papers.detection.task import Detection

    options = config.dataset.as_kind(GeneratedShapes)
    splits = generated(options.size, options.resolution, options.split_seed)
    about = (
        f"generated images of {options.resolution}x{options.resolution} with {', '.join(SHAPES)}"
    )
    return Detection(config, splits, device, about)


@cache
def generated(size: int = 200, resolution: int = 64, split_seed: int = 0) -> dict[str, Split]:
    """Images with one to three discs, squares and triangles of any colour on noise, some behind
    others, by split. ``size`` are for training, and 24 for each other split.
    """
    random = np.random.default_rng(split_seed)
    mask = api("generated_shapes").mask
    images: list[NDArray[np.uint8]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(size + 2 * HELD_OUT):
        image, shapes = _image(random, resolution)
        images.append(image)
        for kind, pixels in shapes:
            runs = mask.encode(np.asfortranarray(pixels, np.uint8))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": kind + 1,
                    "bbox": mask.toBbox(runs).tolist(),
                    "area": int(pixels.sum()),
                    "iscrowd": 0,
                    "segmentation": {**runs, "counts": runs["counts"].decode()},
                }
            )
    sides = {"height": resolution, "width": resolution}
    dataset = {
        "images": [{"id": n, "file_name": f"{n}.png", **sides} for n in range(len(images))],
        "categories": [{"id": n, "name": name} for n, name in enumerate(SHAPES, 1)],
        "annotations": annotations,
    }
    return in_order(Shapes(np.stack(images), dataset), size, HELD_OUT)


def _image(
    random: np.random.Generator, side: int
) -> tuple[NDArray[np.uint8], list[tuple[int, NDArray[np.bool_]]]]:
    """An image, and the kinds and visible pixels of its shapes, of which enough is seen."""
    image = random.integers(0, 80, (side, side, 3), np.uint8)
    shapes: list[tuple[int, NDArray[np.bool_]]] = []
    for _ in range(random.integers(1, 4)):
        kind = int(random.integers(len(SHAPES)))
        pixels = _shape(random, kind, side)
        behind = [(k, old & ~pixels, old.sum()) for k, old in shapes]
        if any(visible.sum() < LEAST * whole for _, visible, whole in behind):
            continue  # it would hide another one
        shapes = [(k, visible) for k, visible, _ in behind]
        image[pixels] = random.integers(110, 256, 3, np.uint8)
        shapes.append((kind, pixels))
    return image, shapes


def _shape(random: np.random.Generator, kind: int, side: int) -> NDArray[np.bool_]:
    """The pixels (side, side) of a shape of a fifth to two fifths of the side."""
    radius = random.uniform(0.1, 0.2) * side
    y, x = np.mgrid[:side, :side] - random.uniform(radius, side - radius, 2)[:, None, None]
    if SHAPES[kind] == "disc":
        return np.asarray(x**2 + y**2 <= radius**2)
    if SHAPES[kind] == "square":
        return np.asarray(np.maximum(abs(x), abs(y)) <= 0.9 * radius)
    return np.asarray((y <= radius) & (2 * abs(x) <= y + radius))
