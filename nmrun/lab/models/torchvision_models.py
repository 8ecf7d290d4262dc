"""torchvision's networks for images, from scratch, in the form for ImageNet and in a small form.

The small form begins at full resolution: a first 3x3 convolution with stride 1 and no pooling (He
et al. 2016, section 4.2). VGG has a single linear layer at the end, MobileNet two strides less, and
Swin patches of 2 pixels in windows of 4.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from nmrun.errors import ConfigError

SMALL = 64  # pixels; ``auto`` takes the small form up to this size
LEAST = {"vgg16_bn": 32}  # pixels that are left over from five poolings
FIRST = {  # the first convolution
    **dict.fromkeys(("resnet18", "resnet34", "resnet50"), "conv1"),
    "densenet121": "features.conv0",
    "vgg16_bn": "features.0",
    "mobilenet_v2": "features.0.0",
    **dict.fromkeys(("swin_v2_t", "swin_v2_b"), "features.0.0"),
}
# Liu et al. 2022: width, blocks and heads of each stage, stochastic depth
SWINS: dict[str, dict[str, Any]] = {
    "swin_v2_t": {
        "embed_dim": 96,
        "depths": [2, 2, 6, 2],
        "num_heads": [3, 6, 12, 24],
        "stochastic_depth_prob": 0.2,
    },
    "swin_v2_b": {
        "embed_dim": 128,
        "depths": [2, 2, 18, 2],
        "num_heads": [4, 8, 16, 32],
        "stochastic_depth_prob": 0.5,
    },
}


def build(name: str, shape: tuple[int, ...], classes: int, form: str) -> nn.Module:
    """Build a network: images (B, *shape) to logits (B, classes).

    Args:
        name: a key of ``FIRST``.
        shape: (channels, height, width) of the images.
        form: ``imagenet``, ``cifar`` (the small form), or ``auto``: small up to 64 pixels.

    Raises:
        ConfigError: for images that are too small.
    """
    from torchvision import models

    channels, *sides = shape
    if min(sides) < LEAST.get(name, 1):
        raise ConfigError(
            f"model={name} takes images of {LEAST[name]} pixels or more; these have {min(sides)}"
        )
    small = form == "cifar" or (form == "auto" and max(sides) <= SMALL)
    if small and name in SWINS:
        model = _small_swin(name, classes)
    else:
        model = getattr(models, name)(num_classes=classes)
    first: Any = model.get_submodule(FIRST[name])
    width, kernel, stride, padding = (
        first.out_channels,
        first.kernel_size,
        first.stride,
        first.padding,
    )
    if small and name in ("resnet18", "resnet34", "resnet50", "densenet121"):
        kernel, stride, padding = (3, 3), (1, 1), (1, 1)
        pool = "maxpool" if name != "densenet121" else "features.pool0"
        model.set_submodule(pool, nn.Identity())
    elif small and name == "vgg16_bn":
        model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, classes)
    elif small and name == "mobilenet_v2":
        second: Any = model.get_submodule("features.2.conv.1.0")
        stride = second.stride = (1, 1)
    if (channels, kernel, stride) != (first.in_channels, first.kernel_size, first.stride):
        conv = nn.Conv2d(channels, width, kernel, stride, padding, bias=first.bias is not None)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        model.set_submodule(FIRST[name], conv)
    return model


def _small_swin(name: str, classes: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    return swin.SwinTransformer(
        patch_size=[2, 2],
        window_size=[4, 4],
        num_classes=classes,
        block=swin.SwinTransformerBlockV2,
        downsample_layer=swin.PatchMergingV2,
        **SWINS[name],
    )
