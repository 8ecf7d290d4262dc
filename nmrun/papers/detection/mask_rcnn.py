"""Mask R-CNN with a feature pyramid (He et al. 2017, arXiv 1703.06870; Lin et al. 2017, arXiv
1612.03144), of torchvision's parts. It begins from scratch or on a classifier's weights
(``init=RUN``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision import models
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

POOLED = 7  # of a side: the box head sees so many cells of a region


class Detector(detection.MaskRCNN):
    """torchvision's Mask R-CNN. It gives losses where it is told the targets, and detections where
    it is not, whatever the mode of its layers.

    ``frozen_norms``: the backbone's batch norms compute in evaluation mode always.
    """

    part_of_tasks = ("backbone.body",)
    """What may begin with the weights of a classifier, but for ``heads_of_tasks``."""
    heads_of_tasks = ("fc",)

    def __init__(self, backbone: nn.Module, frozen_norms: bool, **kwargs: Any) -> None:
        super().__init__(backbone, **kwargs)
        self.frozen_norms = frozen_norms

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        """Losses by name, or a list of detections, of images (3, height, width), float32 from 0 to
        1.

        ``targets`` are for each image ``boxes`` (K, 4), ``labels`` (K,) from 1 and ``masks`` (K,
        height, width).
        """
        ways = [self, self.rpn, self.roi_heads]  # these choose by their mode what they compute
        modes = [module.training for module in ways]
        for module in ways:
            module.training = targets is not None
        try:
            return super().forward(images, targets)
        finally:
            for module, mode in zip(ways, modes, strict=True):
                module.training = mode

    def train(self, mode: bool = True) -> Detector:
        """Set the mode of the layers, but for the batch norms that are frozen."""
        super().train(mode)
        if self.frozen_norms:
            for module in self.backbone.body.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self


def build(
    categories: int,
    backbone: str,
    width: int,
    min_size: int,
    max_size: int,
    anchors: list[int],
    regions: int,
    frozen_norms: bool,
) -> Detector:
    """A detector. With torchvision's sizes it is ``maskrcnn_resnet50_fpn``."""
    body = getattr(models, backbone)()
    first = body.inplanes // 8
    pyramid = BackboneWithFPN(
        body,
        {f"layer{number + 1}": str(number) for number in range(4)},
        [first * 2**number for number in range(4)],
        width,
        LastLevelMaxPool(),
    )
    return Detector(
        pyramid,
        frozen_norms,
        min_size=min_size,
        max_size=max_size,
        rpn_anchor_generator=AnchorGenerator(
            tuple((side,) for side in anchors), ((0.5, 1.0, 2.0),) * len(anchors)
        ),
        box_head=TwoMLPHead(width * POOLED**2, 4 * width),
        box_predictor=FastRCNNPredictor(4 * width, categories + 1),
        box_batch_size_per_image=regions,
        mask_head=MaskRCNNHeads(width, (width,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(width, width, categories + 1),
    )
