"""Networks for images: small ones, those of torchvision and those of timm.

Each takes images (B, C, H, W) and gives logits (B, classes); ``shape`` is (C, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, needs, refused
from nmrun.lab.tasks.hugging_face import quiet
from nmrun.products.attention import DotProductAttention
from nmrun.step.activations import SquaredReLU


class SmallConvNetwork(nn.Module):
    """3x3 convolutions ``stem``, ``inner.0``, ... with ReLU, and a linear ``head``.

    ``stem`` goes from the image to ``channels[0]``, ``inner.i`` from ``channels[i]`` to
    ``channels[i + 1]``. A 2x2 max pooling follows each inner convolution while the map is larger
    than 2x2. ``batch_norm`` puts batch normalisation before each ReLU.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        channels: Sequence[int],
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        colours, height, width = shape
        self.stem = nn.Conv2d(colours, channels[0], 3, padding=1)
        self.inner = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (channels if batch_norm else ()))
        self.pooled = 0
        while self.pooled < len(self.inner) and min(height, width) > 2:
            height, width, self.pooled = height // 2, width // 2, self.pooled + 1
        self.head = nn.Linear(channels[-1] * height * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self._normed(0, self.stem(x)).relu()
        for index, conv in enumerate(self.inner):
            x = self._normed(index + 1, conv(x)).relu()
            if index < self.pooled:
                x = nn.functional.max_pool2d(x, 2)
        return self.head(x.flatten(1))

    def _normed(self, index: int, x: Tensor) -> Tensor:
        return self.norms[index](x) if self.norms else x


def small_conv_bn(
    shape: tuple[int, ...], classes: int, channels: Sequence[int]
) -> SmallConvNetwork:
    return SmallConvNetwork(shape, classes, channels, batch_norm=True)


class MLPNetwork(nn.Module):
    """A perceptron over the raw pixels: linear ``stem``, ``inner.0``, ... and ``head``, with ReLU
    between.

    ``stem`` goes from pixels to ``hidden[0]``, ``inner.i`` from ``hidden[i]`` to ``hidden[i + 1]``.
    Some pixels of digits are 0 in every image, so some weights never get a gradient.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Linear(math.prod(shape), hidden[0])
        self.inner = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(hidden))
        self.head = nn.Linear(hidden[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1)).relu()
        for layer in self.inner:
            x = layer(x).relu()
        return self.head(x)


class PaddedShortcut(nn.Module):
    """Takes every second pixel and doubles the channels with zeros: option A, no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        return nn.functional.pad(
            x[:, :, ::2, ::2], (0, 0, 0, 0, channels // 2, channels - channels // 2)
        )


class CifarResNet(nn.Module):
    """The residual networks for CIFAR of He et al. 2016, section 4.2, with ``depth`` = 6n + 2
    layers.

    ``conv1``; ``layer1``, ``layer2``, ``layer3`` of n basic blocks with 16, 32 and 64 channels;
    ``fc``.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, depth: int) -> None:
        from torchvision.models.resnet import BasicBlock

        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16) for _ in range(blocks)))
        self.layer2, self.layer3 = (
            nn.Sequential(
                BasicBlock(width // 2, width, 2, PaddedShortcut()),
                *(BasicBlock(width, width) for _ in range(blocks - 1)),
            )
            for width in (32, 64)
        )
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


SMALL = 64  # pixels; ``auto`` takes the small form up to this size
# Liu et al. 2022: width, blocks and heads of each stage, stochastic depth
SWINS: dict[str, dict[str, Any]] = {
    "swin_v2_t": {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "stochastic_depth_prob": 0.2},
    "swin_v2_b": {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "stochastic_depth_prob": 0.5},
}  # fmt: skip


def of_torchvision(
    name: str, shape: tuple[int, ...], classes: int, form: str, pretrained: bool = False
) -> nn.Module:
    """A network of torchvision. Raises ConfigError for ``pretrained`` where its
    weights do not fit or cannot be downloaded.

    ``form`` is ``imagenet``, ``cifar``, or ``auto``: the latter up to 64 pixels. The form for CIFAR
    begins at full resolution: a first 3x3 convolution with stride 1 and no pooling (He et al. 2016,
    section 4.2). VGG has a single linear layer at the end, MobileNet two strides less, and Swin
    patches of 2 pixels in windows of 4.
    """
    from torchvision import models

    channels, *sides = shape
    small = form == "cifar" or (form == "auto" and max(sides) <= SMALL)
    if pretrained and (small or channels != 3):
        raise ConfigError(
            f"model.pretrained=true: torchvision's weights of {name} are for coloured images and "
            f"model.form=imagenet; these have {'x'.join(map(str, shape))}"
        )
    if small and name == "vgg16_bn" and min(sides) < 32:
        raise ConfigError(
            f"model={name}: five poolings leave nothing of {min(sides)} pixels; "
            "dataset.resolution=32 scales images of CIFAR, Fashion-MNIST and folders"
        )
    if small and name in SWINS:
        model = _small_swin(name, classes)
    elif pretrained:
        model = _trained_by_torchvision(name, classes)
    else:
        model = getattr(models, name)(num_classes=classes)
    place = next(n for n, module in model.named_modules() if isinstance(module, nn.Conv2d))
    first: Any = model.get_submodule(place)
    kernel, stride, padding = first.kernel_size, first.stride, first.padding
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
        bias = first.bias is not None
        conv = nn.Conv2d(channels, first.out_channels, kernel, stride, padding, bias=bias)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        model.set_submodule(place, conv)
    return model


def _trained_by_torchvision(name: str, classes: int) -> nn.Module:
    """Torchvision's best weights of a network, with a new head for these classes."""
    from torchvision import models

    said = f"model.pretrained=true: the weights of {name} are not in {torch.hub.get_dir()}, and their download failed: "
    with refused(said, OSError):  # of the network, or of a file
        model: nn.Module = getattr(models, name)(weights="DEFAULT", progress=False)
    head = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    fresh = getattr(models, name)(num_classes=classes)
    model.set_submodule(head, fresh.get_submodule(head))
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


PATCHES = (4, 16)  # of images below ``SMALL`` pixels, and of others


class ImageAttention(nn.Module):
    """Self-attention in the place of ``nn.MultiheadAttention``, with its initial weights.
    ``query``, ``key`` and ``value`` are layers of their own, so that each can be sparse or dense.
    """

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = fused.num_heads
        self.query, self.key, self.value = (
            _linear(weight.clone(), bias.clone())
            for weight, bias in zip(
                fused.in_proj_weight.detach().chunk(3),
                fused.in_proj_bias.detach().chunk(3),
                strict=True,
            )
        )
        self.out_proj = _linear(fused.out_proj.weight.detach(), fused.out_proj.bias.detach())
        self.attend = DotProductAttention()

    def forward(self, x: Tensor, *same: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        """(B, T, width) to the same, and None; the three inputs are one."""
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = self.attend(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width)), None


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


def vit(
    shape: tuple[int, ...],
    classes: int,
    layers: int,
    heads: int,
    width: int,
    patch: int | None,
    dropout: float,
    stochastic_depth: float,
    activation: str,
) -> nn.Module:
    """A vision transformer (Dosovitskiy et al. 2021; DeiT, Touvron et al. 2021) by torchvision, for
    square images.

    ``patch`` pixels a side divide the image's; None: by the size of the image. The last block is
    left out with probability ``stochastic_depth``, which rises linearly from the first (Huang et
    al. 2016). Raises ConfigError for sizes that do not divide.
    """
    from torchvision.models import VisionTransformer
    from torchvision.ops import StochasticDepth

    channels, height, side = shape
    patch = patch or PATCHES[side >= SMALL]
    if height != side or side % patch:
        raise ConfigError(
            f"model.patch={patch}: images of {height}x{side} are not squares of a multiple of that"
        )
    model = VisionTransformer(
        side, patch, layers, heads, width, 4 * width, dropout, num_classes=classes
    )
    if channels != 3:
        model.conv_proj = nn.Conv2d(channels, width, patch, patch)
        nn.init.trunc_normal_(model.conv_proj.weight, std=math.sqrt(1 / (channels * patch * patch)))
        nn.init.zeros_(model.conv_proj.bias)
    blocks: Any = model.encoder.layers
    for number, block in enumerate(blocks):
        drop = stochastic_depth * number / max(layers - 1, 1)
        block.self_attention = ImageAttention(block.self_attention)
        if activation == "relu2":
            block.mlp[1] = SquaredReLU()
        if drop:
            block.dropout = nn.Sequential(block.dropout, StochasticDepth(drop, "row"))
            block.mlp.append(StochasticDepth(drop, "row"))
    return model


def of_timm(
    shape: tuple[int, ...],
    classes: int,
    name_in_timm: str,
    options: dict[str, Any] | None,
    pretrained: bool = False,
) -> nn.Module:
    """A network by ``timm.create_model``, with more arguments in ``options``. Transformers also get
    the image size. timm resamples ``pretrained`` weights to size and channels.

    Raises ConfigError for a name or options that timm has not, for images that do not fit, and where timm
    is not installed.
    """
    with needs("model=timm", "timm"):
        import timm
    known = {"num_classes": classes, "in_chans": shape[0], "pretrained": pretrained}
    arguments = {**known, **(options or {})}
    said = f"model.name_in_timm={name_in_timm} with model.options={options}, images {shape}: "
    with refused(said, TypeError, AssertionError, ValueError, RuntimeError, OSError), quiet():
        try:
            model: nn.Module = timm.create_model(name_in_timm, img_size=shape[1:], **arguments)
        except TypeError:  # most convolutional networks take any size and have no such argument
            model = timm.create_model(name_in_timm, **arguments)
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    return model.train()
