"""Detection and segmentation of instances: boxes, classes and masks of the things in an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.tasks.base import Batch, Tally, generator
from nmrun.lab.tasks.items import ItemTask, Key, Place, Split
from nmrun.papers.detection.instances import coco_detections, images_of, precision, targets
from nmrun.papers.detection.keys import Pictured

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

Item = tuple[Any, Any, Any, list[Any], str]  # image, boxes, labels, masks, problem


def collated(items: list[Item]) -> tuple[Any, ...]:
    """The tensors of a micro-batch, as :class:`Detection` says, and what is wrong with an item or nothing."""
    if problem := next((item[-1] for item in items if item[-1]), ""):
        return (*[torch.empty(0)] * 5, problem)
    sizes = torch.tensor([item[0].shape[:2] for item in items])
    height, width = sizes.amax(0).tolist()
    most = max(len(item[1]) for item in items)
    images = torch.zeros(len(items), 3, height, width, dtype=torch.uint8)
    boxes = torch.zeros(len(items), most, 4)
    labels = torch.zeros(len(items), most, dtype=torch.int64)
    masks = torch.zeros(len(items), most, height, -(-width // 8), dtype=torch.uint8)
    for row, (pixels, corners, numbers, shapes, _) in enumerate(items):
        tall, wide = pixels.shape[:2]
        images[row, :, :tall, :wide] = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
        boxes[row, : len(corners)] = torch.from_numpy(corners)
        labels[row, : len(numbers)] = torch.from_numpy(numbers)
        for place, shape in enumerate(shapes):
            masks[row, place, :tall, : -(-wide // 8)] = torch.from_numpy(np.packbits(shape, axis=1))
    return images, sizes, boxes, labels, masks, ""


class Detection(ItemTask):
    """The sum of a detector's own losses; see :class:`nmrun.lab.tasks.base.Task`.

    A model gives a dictionary of losses for ``model(images, targets)`` and a list of detections for
    ``model(images)`` in evaluation mode, as torchvision's do. A micro-batch has, for B images with
    at most K instances: pixels (B, 3, H, W) uint8, height and width (B, 2) int64, boxes (B, K, 4)
    float32, labels (B, K) int64 (0 is none), and masks (B, K, H, W / 8 rounded up) uint8, eight
    pixels a byte. Every second training image is mirrored (``dataset.flip``), a pure function of
    (seed, epoch, row).

    Args:
        config, splits, device, about, workers: as of :class:`ItemTask`; the splits' sources are
            :class:`Pictures`, whose categories are the same.

    Raises:
        ConfigError: as there, and for ``trainer.compile``.
    """

    items = "images"
    metric = "box_ap"
    collate = staticmethod(collated)
    counted_with_values = True
    notes = {"box_ap, mask_ap": "COCO's average precision over 0.50:0.95, by pycocotools"}

    def __init__(
        self,
        config: Config,
        splits: Mapping[str, Split],
        device: torch.device,
        about: str = "",
        workers: int | None = 0,
    ) -> None:
        if config.trainer.compile:
            raise ConfigError(
                "trainer.compile: the shapes in a detector depend on what it finds; leave it false"
            )
        self.categories = sorted(splits["train"].source.coco.cats)
        self.inputs = {"categories": len(self.categories)}
        super().__init__(config, splits, device, about, workers)

    def files(self, config: Config, places: Sequence[Place]) -> Dataset[Item]:
        labels = {category: label for label, category in enumerate(self.categories, 1)}
        return InstanceFiles(places, labels, config.dataset.as_kind(Pictured).flip, config.seed)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        losses: dict[str, Tensor] = model(_images(batch), _targets(batch))
        return torch.stack([loss.float() for loss in losses.values()]).sum()

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        """What was found, as :data:`nmrun.papers.detection.instances.CocoResult`."""
        said, ids = [], images_of(self.splits[split])
        for places, batch, counts in ranks.in_step(self.evaluated(split, rank, world)):
            detections = model(_images(batch))
            for place, of_image in zip(places, detections, strict=True) if counts else ():
                said += coco_detections(ids[place], of_image, self.categories)
        return {"found": said}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        order = {image: place for place, image in enumerate(images_of(self.splits[split]))}
        said = [one for tally in tallies for one in tally["found"]]
        return precision(self.splits[split], sorted(said, key=lambda one: order[one["image_id"]]))


def _images(batch: Batch) -> list[Tensor]:
    """Each image in its own size: (3, height, width) float32 from 0 to 1."""
    return [
        image[:, :height, :width].float() / 255
        for image, (height, width) in zip(batch[0], batch[1].tolist(), strict=True)
    ]


def _targets(batch: Batch) -> list[dict[str, Tensor]]:
    bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=batch[0].device)
    made = []
    for (height, width), boxes, labels, bytes_ in zip(batch[1].tolist(), *batch[2:], strict=True):
        there = labels > 0
        pixels = (bytes_[there][..., None] >> bits & 1).flatten(-2)
        masks = pixels[:, :height, :width]
        made.append({"boxes": boxes[there], "labels": labels[there], "masks": masks})
    return made


class InstanceFiles(Dataset[Item]):
    """Image ``(epoch, row)`` with its instances, in epochs from 0 on mirrored in every second one."""

    def __init__(
        self,
        places: Sequence[Place],
        labels: Mapping[int, int],
        flip: bool,
        seed: int,
    ) -> None:
        self.places, self.labels, self.flip, self.seed = places, labels, flip, seed

    def __getitem__(self, key: Key) -> Item:
        epoch, number = key
        pictures, row = self.places[number]
        about = pictures.coco.imgs[pictures.ids[row]]
        try:
            image, annotations = pictures[row]
        except (OSError, SyntaxError) as error:
            problem = f"{about['file_name']} is damaged, or not an image ({error})"
            return None, None, None, [], problem
        pixels = np.asarray(image)
        height, width = pixels.shape[:2]
        if (height, width) != (about["height"], about["width"]):
            said = f"{about['width']}x{about['height']}"
            return None, None, None, [], f"{about['file_name']} is {width}x{height}, and {said} by its annotations"  # fmt: skip
        boxes, labels, masks = targets(pictures.coco, annotations, self.labels)
        drawn = generator(self.seed, max(epoch, 0), number, 1)
        if self.flip and epoch >= 0 and float(torch.rand((), generator=drawn)) < 0.5:
            pixels, masks = pixels[:, ::-1], [mask[:, ::-1] for mask in masks]
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        return pixels, boxes, labels, masks, ""
