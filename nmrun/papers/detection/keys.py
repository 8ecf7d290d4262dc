"""The keys of detection's data sets and model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import SHARE, Dataset, FromDisk, Seeded
from nmrun.lab.keys.models import Model
from nmrun.lab.keys.ranges import PATH
from nmrun.ranges import FLAG, Check, one_of, whole

INSTANCES = "images with instances"
LEVELS = Check(
    "a list of five whole numbers, 1 or more",
    lambda value: isinstance(value, list) and len(value) == 5 and all(map(whole(1).holds, value)),
)


@dataclass(frozen=True)
class Pictured(Seeded):
    """Images with instances."""

    flip: Annotated[bool, FLAG, "mirror every second training image left to right"] = True


@dataclass(frozen=True)
class GeneratedShapes(Pictured, Dataset):
    """Generated images of discs, squares and triangles with boxes and masks; no photographs (needs
    nmrun[detection]).
    """

    data: ClassVar[str] = INSTANCES
    builder: ClassVar[str] = "nmrun.papers.detection.data.generated_shapes"

    size: Annotated[
        int, whole(1), "training images; 24 others are for validation and 24 for the test"
    ] = 200
    split_seed: Annotated[int, "which images are generated; not changed by the run's seed"] = 0
    resolution: Annotated[int, whole(16), "pixels a side"] = 64


@dataclass(frozen=True)
class Coco(FromDisk, Pictured, Dataset):
    """COCO, or any data set in its format: folders of images, and
    annotations/instances_<folder>.json (needs nmrun[detection]).
    """

    data: ClassVar[str] = INSTANCES
    builder: ClassVar[str] = "nmrun.papers.detection.data.coco"
    within: ClassVar[str] = (
        "folders of images and annotations/instances_<folder>.json (cocodataset.org)"
    )

    path: Annotated[str, PATH, "the folder, in NMRUN_DATA or else in the current folder"] = "coco"
    train: Annotated[str, PATH, "folder in it with images for training and validation"] = (
        "train2017"
    )
    test: Annotated[str, PATH, "folder in it with images for the test"] = "val2017"
    held_out: Annotated[float, SHARE, "share of the training images that is for validation"] = 0.05
    split_seed: Annotated[int, "which images are held out; not changed by the run's seed"] = 0
    limit: Annotated[
        int | None,
        whole(1, optional=True),
        "training images that are used, the first after shuffling; null = all",
    ] = None


@dataclass(frozen=True)
class MaskRCNN(Model):
    """Mask R-CNN with a feature pyramid (He et al. 2017), of torchvision's parts; its ResNet can
    begin with that of a run on images (init=RUN).
    """

    data: ClassVar[str] = INSTANCES
    builder: ClassVar[str] = "nmrun.papers.detection.mask_rcnn.build"

    backbone: Annotated[
        str, one_of("resnet18", "resnet34", "resnet50"), "resnet18, resnet34, resnet50"
    ] = "resnet50"
    width: Annotated[
        int,
        whole(1),
        "channels of the pyramid and the mask head; the box head has four times as many",
    ] = 256
    min_size: Annotated[int, whole(1), "pixels that the shorter side of an image is scaled to"] = (
        800
    )
    max_size: Annotated[int, whole(1), "largest number of pixels of the longer side"] = 1333
    anchors: Annotated[
        Sequence[int],
        LEVELS,
        "sides of the anchors in pixels, one for each level of the pyramid",
    ] = (32, 64, 128, 256, 512)
    regions: Annotated[int, whole(1), "regions of an image that the heads are trained on"] = 512
    frozen_norms: Annotated[
        bool,
        FLAG,
        "keep the statistics that the backbone's batch norms begin with (with init=RUN)",
    ] = False
    exclude: Annotated[
        Sequence[str] | None,
        "the first layer, and the last ones of the proposals and of both heads",
    ] = (
        r"backbone\.body\.conv1",
        r"rpn\.head\.(cls_logits|bbox_pred)",
        r"roi_heads\.(box|mask)_predictor\..*",
    )
