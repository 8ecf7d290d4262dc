"""Images with instances as COCO has them: what a network learns of one, and average precision."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.lab.tasks.items import Split

CocoResult = dict[str, Any]
"""A detected instance, as COCO's result files have them, plain data: ``image_id``, ``category_id``,
``score``, ``bbox`` ([x, y, width, height] in pixels) and ``segmentation`` (run lengths)."""


class Pictures(Protocol):
    """Images with their annotations, as torchvision's CocoDetection has them.

    Attributes:
        coco: the annotations, a ``pycocotools.coco.COCO``.
        ids: the images' numbers in it.
    """

    coco: Any
    ids: list[int]

    def __getitem__(self, row: int, /) -> tuple[Any, list[dict[str, Any]]]:
        """The image ``ids[row]`` (PIL's, RGB) and its annotations."""


def images_of(split: Split) -> list[int]:
    """The numbers of a split's images.

    Args:
        split: of :class:`Pictures`.
    """
    return [split.source.ids[row] for row in split.rows]


def api(dataset: str) -> Any:
    """The package ``pycocotools``.

    Args:
        dataset: the data set that needs it, for the error.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import pycocotools.coco
        import pycocotools.cocoeval
        import pycocotools.mask
    except ImportError:
        raise ConfigError(
            f"dataset={dataset} needs pycocotools: pip install nmrun[detection]"
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
    """What is learned of an image.

    Args:
        coco: the annotations' ``pycocotools.coco.COCO``.

    Returns:
        Boxes (K, 4) from x, y to x, y in pixels, labels (K,), and a mask (height, width) of 0 and 1
        for each.
    """
    some = [annotation for annotation in annotations if learned(annotation)]
    boxes = np.array([a["bbox"] for a in some], np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    numbers = np.array([labels[a["category_id"]] for a in some], np.int64)
    return boxes, numbers, [coco.annToMask(a) for a in some]


def coco_detections(
    image: int, detections: Mapping[str, Tensor], categories: Sequence[int]
) -> list[CocoResult]:
    """What a network of torchvision says of an image, as COCO's result files have it.

    Args:
        detections: ``boxes`` (K, 4), ``labels`` (K,) from 1, ``scores`` (K,) and ``masks``
            (K, 1, height, width), the probability of each pixel.
        categories: the number of each label, from label 1 on.
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


def precision(split: Split, said: Sequence[CocoResult]) -> dict[str, float]:
    """COCO's average precision, by pycocotools.

    Args:
        split: of :class:`Pictures`.

    Returns:
        ``box_ap`` and ``mask_ap``, the mean over intersections over union of 0.5 to 0.95, and with
        ``50`` and ``75`` those at 0.5 and 0.75: from 0 to 1.
    """
    from pycocotools.cocoeval import COCOeval

    scores = {}
    for name, kind, left_out in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        # with a box beside it, a mask would get the box's area
        mine = [{key: value for key, value in one.items() if key != left_out} for one in said]
        stats = [0.0, 0.0, 0.0]
        if mine:
            with quiet():
                coco = split.source.coco
                judge = COCOeval(coco, coco.loadRes(mine), kind)
                judge.params.imgIds = images_of(split)
                judge.evaluate()
                judge.accumulate()
                judge.summarize()
            stats = judge.stats[:3].tolist()
        for at, value in zip(("", "50", "75"), stats, strict=True):
            scores[f"{name}_ap{at}"] = max(0.0, float(value))  # -1 where there is nothing to find
    return scores
