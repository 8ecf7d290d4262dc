"""Detection and segmentation of instances: boxes, classes and masks of the things in an image, as
COCO has them, and average precision.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.tasks.base import Batch, Tally, generator
from nmrun.lab.tasks.items import ItemTask, Key, Place, Split
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
    """The sum of a detector's own losses.

    A model gives a dictionary of losses for ``model(images, targets)`` and a list of detections for
    ``model(images)``, as torchvision's do. Every second training image is mirrored
    (``dataset.flip``), a pure function of (seed, epoch, row). A micro-batch has, for B images with
    at most K instances:

    - pixels (B, 3, H, W) uint8, and height and width (B, 2) int64;
    - boxes (B, K, 4) float32, and labels (B, K) int64 (0 is none);
    - masks (B, K, H, W / 8 rounded up) uint8, eight pixels a byte.

    The splits' sources are :class:`Pictures`, whose categories are the same. Raises ConfigError for
    ``trainer.compile``.
    """

    items = "images"
    metric = "box_ap"
    higher_is_better = True
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
        """What was found, as :data:`nmrun.papers.detection.task.CocoResult`."""
        results, ids = [], images_of(self.splits[split])
        for places, batch, counts in ranks.in_step(self.evaluated(split, rank, world)):
            detections = model(_images(batch))
            for place, of_image in zip(places, detections, strict=True) if counts else ():
                results += coco_detections(ids[place], of_image, self.categories)
        return {"results": results}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        order = {image: place for place, image in enumerate(images_of(self.splits[split]))}
        results = [result for tally in tallies for result in tally["results"]]
        return precision(
            self.splits[split], sorted(results, key=lambda result: order[result["image_id"]])
        )


def _images(batch: Batch) -> list[Tensor]:
    """Each image in its own size: (3, height, width) float32 from 0 to 1."""
    return [
        image[:, :height, :width].float() / 255
        for image, (height, width) in zip(batch[0], batch[1].tolist(), strict=True)
    ]


def _targets(batch: Batch) -> list[dict[str, Tensor]]:
    bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=batch[0].device)
    per_image = []
    for (height, width), boxes, labels, bytes_ in zip(batch[1].tolist(), *batch[2:], strict=True):
        valid = labels > 0
        pixels = (bytes_[valid][..., None] >> bits & 1).flatten(-2)
        masks = pixels[:, :height, :width]
        per_image.append({"boxes": boxes[valid], "labels": labels[valid], "masks": masks})
    return per_image


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
            size = f"{about['width']}x{about['height']}"
            return None, None, None, [], f"{about['file_name']} is {width}x{height}, and {size} by its annotations"  # fmt: skip
        boxes, labels, masks = targets(pictures.coco, annotations, self.labels)
        random = generator(self.seed, max(epoch, 0), number, 1)
        if self.flip and epoch >= 0 and float(torch.rand((), generator=random)) < 0.5:
            pixels, masks = pixels[:, ::-1], [mask[:, ::-1] for mask in masks]
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        return pixels, boxes, labels, masks, ""


CocoResult = dict[str, Any]
"""A detected instance, as COCO's result files have them, plain data: ``image_id``, ``category_id``,
``score``, ``bbox`` ([x, y, width, height] in pixels) and ``segmentation`` (run lengths)."""


class Pictures(Protocol):
    """Images with their annotations, as torchvision's CocoDetection has them: ``coco`` is a
    ``pycocotools.coco.COCO``, ``ids`` are the images' numbers in it.
    """

    coco: Any
    ids: list[int]

    def __getitem__(self, row: int, /) -> tuple[Any, list[dict[str, Any]]]:
        """The image ``ids[row]`` (PIL's, RGB) and its annotations."""


def images_of(split: Split) -> list[int]:
    """The numbers of a split's images."""
    return [split.source.ids[row] for row in split.rows]


def api(dataset: str) -> Any:
    """The package ``pycocotools``. Raises ConfigError if it is not installed."""
    try:
        import pycocotools.coco
        import pycocotools.cocoeval
        import pycocotools.mask
    except ImportError:
        raise ConfigError(
            f"dataset={dataset} needs pycocotools: pip install 'nmrun[detection]'"
        ) from None
    return pycocotools


def quiet() -> contextlib.AbstractContextManager[Any]:
    """The context of calls of pycocotools, which prints."""
    return contextlib.redirect_stdout(io.StringIO())


def learned(annotation: Mapping[str, Any]) -> bool:
    """Whether an instance is learned: it has an area, and is no crowd."""
    *_, width, height = annotation["bbox"]
    return width > 0 and height > 0 and not annotation.get("iscrowd", 0)


def targets(
    coco: Any, annotations: Sequence[Mapping[str, Any]], labels: Mapping[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.int64], list[NDArray[np.uint8]]]:
    """Boxes (K, 4) from x, y to x, y in pixels, labels (K,), and a mask (height, width) for each."""
    instances = [annotation for annotation in annotations if learned(annotation)]
    boxes = np.array([a["bbox"] for a in instances], np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    numbers = np.array([labels[a["category_id"]] for a in instances], np.int64)
    return boxes, numbers, [coco.annToMask(a) for a in instances]


def coco_detections(
    image: int, detections: Mapping[str, Tensor], categories: Sequence[int]
) -> list[CocoResult]:
    """What a network of torchvision says of an image, as COCO's result files have it.

    ``detections`` are ``boxes`` (K, 4), ``labels`` (K,) from 1, ``scores`` (K,) and ``masks`` (K,
    1, height, width), the probability of each pixel. ``categories`` are the numbers of the labels.
    """
    from pycocotools import mask

    boxes, scores = (detections[key].float().cpu() for key in ("boxes", "scores"))
    boxes[:, 2:] -= boxes[:, :2]
    pixels = (detections["masks"][:, 0] >= 0.5).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return [
        {
            "image_id": image,
            "category_id": categories[label - 1],
            "score": score,
            "bbox": box,
            "segmentation": {"size": runs["size"], "counts": runs["counts"].decode()},
        }
        for label, score, box, runs in zip(
            detections["labels"].tolist(),
            scores.tolist(),
            boxes.tolist(),
            mask.encode(np.asfortranarray(pixels)),
            strict=True,
        )
    ]


def precision(split: Split, results: Sequence[CocoResult]) -> dict[str, float]:
    """COCO's average precision by pycocotools, 0 to 1: ``box_ap`` and ``mask_ap`` are means over
    intersections over union of 0.5 to 0.95. With ``50`` and ``75`` they are those at 0.5 and 0.75.
    """
    from pycocotools.cocoeval import COCOeval

    scores = {}
    for name, kind, left_out in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        # with a box beside it, a mask would get the box's area
        entries = [
            {key: value for key, value in result.items() if key != left_out} for result in results
        ]
        stats = [0.0, 0.0, 0.0]
        if entries:
            with quiet():
                coco = split.source.coco
                judge = COCOeval(coco, coco.loadRes(entries), kind)
                judge.params.imgIds = images_of(split)
                judge.evaluate()
                judge.accumulate()
                judge.summarize()
            stats = judge.stats[:3].tolist()
        for threshold, value in zip(("", "50", "75"), stats, strict=True):
            scores[f"{name}_ap{threshold}"] = max(
                0.0, float(value)
            )  # -1 where there is nothing to find
    return scores
