"""The keys of detection's data sets and model, and what the package says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.data_groups import SHARE, Dataset, Seeded
from nmrun.lab.keys.installed import Entry
from nmrun.lab.keys.models import Model
from nmrun.ranges import FLAG, LEVELS, PATH, one_of, whole

INSTANCES = "images with instances"


@dataclass(frozen=True)
class Pictured(Seeded):
    """Images with instances."""

    flip: Annotated[bool, FLAG]


@dataclass(frozen=True)
class GeneratedShapes(Pictured, Dataset):
    """Generated shapes."""

    data: ClassVar[str] = INSTANCES

    size: Annotated[int, whole(1)]
    resolution: Annotated[int, whole(16)]


@dataclass(frozen=True)
class Coco(Pictured, Dataset):
    """COCO, and data sets in its format."""

    data: ClassVar[str] = INSTANCES
    within: ClassVar[str] = (
        "folders of images and annotations/instances_<folder>.json (cocodataset.org)"
    )

    path: Annotated[str, PATH]
    train: Annotated[str, PATH]
    test: Annotated[str, PATH]
    held_out: Annotated[float, SHARE]
    limit: Annotated[int | None, whole(1, optional=True)]
    workers: Annotated[int | None, whole(0, optional=True)]


@dataclass(frozen=True)
class MaskRCNN(Model):
    """Mask R-CNN."""

    data: ClassVar[str] = INSTANCES

    backbone: Annotated[str, one_of("resnet18", "resnet34", "resnet50")]
    width: Annotated[int, whole(1)]
    min_size: Annotated[int, whole(1)]
    max_size: Annotated[int, whole(1)]
    anchors: Annotated[list[int], LEVELS]
    regions: Annotated[int, whole(1)]
    frozen_norms: Annotated[bool, FLAG]


CONF = "nmrun.papers.conf"
SHAPES = Entry(GeneratedShapes, "nmrun.papers.detection.generated_shapes.build", CONF)
COCO = Entry(Coco, "nmrun.papers.detection.coco.build", CONF)
MASK_RCNN = Entry(MaskRCNN, "nmrun.papers.detection.mask_rcnn.build", CONF)
