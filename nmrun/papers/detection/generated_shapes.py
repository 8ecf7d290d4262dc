"""A generated data set that needs no download, in COCO's format: discs, squares and triangles of any
colour on noise, some behind others.

It shows that training works, and nothing about photographs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.lab.tasks.items import Split, in_order
from nmrun.papers.detection.instances import api, quiet
from nmrun.papers.detection.keys import GeneratedShapes

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.papers.detection.task import Detection

KINDS = ("disc", "square", "triangle")
HELD_OUT = 24  # images for validation, and as many for the test
LEAST = 0.25  # of what is seen of a shape that another one may not hide


class Shapes:
    """Images in memory, as torchvision's CocoDetection has those of files.

    Args:
        images: (N, side, side, 3), uint8.
    """

    def __init__(self, images: NDArray[np.uint8], dataset: dict[str, Any]) -> None:
        self.images, self.coco = images, api("generated_shapes").coco.COCO()
        self.coco.dataset = dataset
        with quiet():
            self.coco.createIndex()
        self.ids = sorted(self.coco.imgs)

    def __getitem__(self, row: int, /) -> tuple[Any, list[dict[str, Any]]]:
        from PIL import Image

        return Image.fromarray(self.images[row]), self.coco.imgToAnns[self.ids[row]]


def build(config: Config, device: torch.device) -> Detection:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    from nmrun.papers.detection.task import Detection

    options = config.dataset.as_kind(GeneratedShapes)
    splits = load(options.size, options.resolution, options.split_seed)
    about = f"generated images of {options.resolution}x{options.resolution} with {', '.join(KINDS)}"
    return Detection(config, splits, device, about)


@cache
def load(size: int = 200, resolution: int = 64, split_seed: int = 0) -> dict[str, Split]:
    """Generate images with one to three shapes.

    Args:
        size: of the training split; each of the others has 24 images.

    Returns:
        The splits ``train``, ``val`` and ``test``.
    """
    random = np.random.default_rng(split_seed)
    mask = api("generated_shapes").mask
    images: list[NDArray[np.uint8]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(size + 2 * HELD_OUT):
        image, seen = _image(random, resolution)
        images.append(image)
        for kind, pixels in seen:
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
        "categories": [{"id": n, "name": name} for n, name in enumerate(KINDS, 1)],
        "annotations": annotations,
    }
    return in_order(Shapes(np.stack(images), dataset), size, HELD_OUT)


def _image(
    random: np.random.Generator, side: int
) -> tuple[NDArray[np.uint8], list[tuple[int, NDArray[np.bool_]]]]:
    """An image, and the kinds and visible pixels of its shapes, of which enough is seen."""
    image = random.integers(0, 80, (side, side, 3), np.uint8)
    seen: list[tuple[int, NDArray[np.bool_]]] = []
    for _ in range(random.integers(1, 4)):
        kind = int(random.integers(len(KINDS)))
        pixels = _shape(random, kind, side)
        behind = [(k, old & ~pixels, old.sum()) for k, old in seen]
        if any(left.sum() < LEAST * whole for _, left, whole in behind):
            continue  # it would hide another one
        seen = [(k, left) for k, left, _ in behind]
        image[pixels] = random.integers(110, 256, 3, np.uint8)
        seen.append((kind, pixels))
    return image, seen


def _shape(random: np.random.Generator, kind: int, side: int) -> NDArray[np.bool_]:
    """The pixels (side, side) of a shape of a fifth to two fifths of the side."""
    radius = random.uniform(0.1, 0.2) * side
    y, x = np.mgrid[:side, :side] - random.uniform(radius, side - radius, 2)[:, None, None]
    if KINDS[kind] == "disc":
        return np.asarray(x**2 + y**2 <= radius**2)
    if KINDS[kind] == "square":
        return np.asarray(np.maximum(abs(x), abs(y)) <= 0.9 * radius)
    return np.asarray((y <= radius) & (2 * abs(x) <= y + radius))
