"""The residual networks for CIFAR of He et al. 2016, section 4.2, with 6n + 2 layers."""

from __future__ import annotations

from torch import Tensor, nn

from nmrun.errors import ConfigError


class PaddedShortcut(nn.Module):
    """Takes every second pixel and doubles the channels with zeros: option A, no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        return nn.functional.pad(
            x[:, :, ::2, ::2], (0, 0, 0, 0, channels // 2, channels - channels // 2)
        )


class CifarResNet(nn.Module):
    """``conv1``; ``layer1``, ``layer2``, ``layer3`` of (depth - 2) / 6 basic blocks with 16, 32 and
    64 channels; ``fc``.

    Images (B, C, H, W) to logits (B, classes).

    Args:
        shape: (C, H, W).
        depth: layers with weights: 20, 32, 44, 56, ...
    """

    def __init__(self, shape: tuple[int, ...], classes: int, depth: int) -> None:
        from torchvision.models.resnet import BasicBlock

        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ConfigError(
                f"model.depth={depth}: these networks have 6n + 2 layers: 8, 14, 20, 32, 44, 56, 110, ..."
            )
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


def build(shape: tuple[int, ...], classes: int, depth: int) -> CifarResNet:
    """Build the residual network.

    Args:
        shape: (channels, height, width) of the images.
        depth: the number of layers, 6n + 2.

    Raises:
        ConfigError: for another depth.
    """
    return CifarResNet(shape, classes, depth)
