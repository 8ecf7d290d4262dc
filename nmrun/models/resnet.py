"""torchvision's ResNet-18 for small images: a 3x3 first convolution with stride 1, no max pooling (He et al. 2016, 4.2)."""

from __future__ import annotations

from torch import nn


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
