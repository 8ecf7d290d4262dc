"""The keys of models: what all have, and those of convolutional networks and of timm's.
Transformers are in ``transformers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from nmrun.lab.keys.datasets import IMAGES
from nmrun.lab.keys.groups import Named
from nmrun.lab.keys.ranges import EXPRESSIONS, WIDTHS
from nmrun.ranges import TEXT, Check, one_of, whole

ARGUMENTS = Check(
    "null or keyword arguments such as {drop_path_rate: 0.1}",
    lambda value: isinstance(value, dict | None),
)


@dataclass(frozen=True)
class Model(Named):
    """A model: the modules that may be sparse.

    Attributes:
        decays: which parameters its literature lets decay, for ``optimizer.decay=null``.
        data: what it takes, as data sets say it.
        trained: whether it can come trained to the last layer.
        builder: of an installed package's, the dotted path of what builds it.
    """

    decays: ClassVar[str] = "all"
    data: ClassVar[str] = IMAGES
    trained: ClassVar[bool] = False
    builder: ClassVar[str] = ""

    include: Annotated[
        Sequence[str] | None,
        EXPRESSIONS,
        "regular expressions for whole module names that may be sparse; null = all",
    ] = None
    exclude: Annotated[
        Sequence[str] | None,
        EXPRESSIONS,
        "first and last layer stay dense for all recipes: the papers differ "
        "(docs/recipes/index.md)",
    ] = None

    @classmethod
    def layer_inputs(cls, given: Mapping[str, Any]) -> dict[str, int]:
        """The inputs of each layer that can be sparse by name, 0 where they depend on the data; none
        where they are not known without building the model.

        Args:
            given: the keys of the model.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class OwnModel(Model):
    """A model of the user's own: ``target`` builds it, and knows the keys in ``options``."""

    target: str
    options: dict[str, Any]

    def values(self) -> dict[str, Any]:
        beside = {"_target_": self.target, "include": self.include, "exclude": self.exclude}
        return {**beside, **self.options}


def _in_a_row(widths: Sequence[int]) -> dict[str, int]:
    inner = {f"inner.{number}": width for number, width in enumerate(widths[:-1])}
    return {"stem": 0, **inner, "head": 0}


@dataclass(frozen=True)
class SmallConv(Model):
    """3x3 convolutions with ReLU, max-pooled twice, and a linear head; no normalisation."""

    channels: Annotated[Sequence[int], WIDTHS, "of the stem and the inner convolutions"] = (
        32,
        64,
        64,
    )
    exclude: Sequence[str] | None = ("stem", "head")

    @classmethod
    def layer_inputs(cls, given: Mapping[str, Any]) -> dict[str, int]:
        return _in_a_row(given["channels"])


@dataclass(frozen=True)
class SmallConvBN(SmallConv):
    """3x3 convolutions with ReLU, max-pooled twice, and a linear head; batch normalisation before
    each ReLU.
    """


@dataclass(frozen=True)
class MLP(Model):
    """A perceptron over the raw pixels, some of which are always zero."""

    hidden: Annotated[Sequence[int], WIDTHS, "widths of the hidden layers"] = (64, 64)
    exclude: Sequence[str] | None = ("stem", "head")

    @classmethod
    def layer_inputs(cls, given: Mapping[str, Any]) -> dict[str, int]:
        return _in_a_row(given["hidden"])


@dataclass(frozen=True)
class ResNet20(Model):
    """ResNet-20 for CIFAR, 0.27 million parameters, shortcuts without parameters (He et al. 2016,
    4.2).
    """

    depth: Annotated[int, whole(8), "6n + 2 layers"] = 20
    exclude: Sequence[str] | None = ("conv1", "fc")


@dataclass(frozen=True)
class ResNet32(ResNet20):
    """ResNet-32 for CIFAR, 0.46 million parameters, shortcuts without parameters (He et al. 2016,
    4.2).
    """

    depth: int = 32


@dataclass(frozen=True)
class Torchvision(Model):
    """A network of torchvision."""

    form: Annotated[
        str,
        one_of("auto", "cifar", "imagenet"),
        "auto, imagenet, or cifar: a 3x3 stem and no first pooling (auto: for up to 64 pixels)",
    ] = "auto"


@dataclass(frozen=True)
class ResNet18(Torchvision):
    """torchvision's ResNet-18 (He et al. 2016)."""

    exclude: Sequence[str] | None = ("conv1", "fc")

    @classmethod
    def layer_inputs(cls, given: Mapping[str, Any]) -> dict[str, int]:
        found = {"conv1": 0}
        before = 64
        for stage, width in enumerate((64, 128, 256, 512), 1):
            for block in (0, 1):
                name = f"layer{stage}.{block}"
                found |= {f"{name}.conv1": before, f"{name}.conv2": width}
                if before != width:
                    found[f"{name}.downsample.0"] = before
                before = width
        return {**found, "fc": before}


@dataclass(frozen=True)
class ResNet34(Torchvision):
    """torchvision's ResNet-34 (He et al. 2016)."""

    exclude: Sequence[str] | None = ("conv1", "fc")


@dataclass(frozen=True)
class ResNet50(Torchvision):
    """torchvision's ResNet-50 (He et al. 2016)."""

    exclude: Sequence[str] | None = ("conv1", "fc")


@dataclass(frozen=True)
class DenseNet121(Torchvision):
    """torchvision's DenseNet-121 (Huang et al. 2017)."""

    exclude: Sequence[str] | None = (r"features\.conv0", "classifier")


@dataclass(frozen=True)
class VGG16(Torchvision):
    """torchvision's VGG-16 with batch normalisation (Simonyan and Zisserman 2015)."""

    form: Annotated[
        str, "auto, imagenet, or cifar: one linear layer at the end (auto: for up to 64 pixels)"
    ] = "auto"
    exclude: Sequence[str] | None = (r"features\.0", r"classifier(\.6)?")


@dataclass(frozen=True)
class MobileNetV2(Torchvision):
    """torchvision's MobileNetV2 (Sandler et al. 2018); depthwise convolutions have one input each and
    stay dense.
    """

    form: Annotated[
        str, "auto, imagenet, or cifar: two strides less (auto: for up to 64 pixels)"
    ] = "auto"
    exclude: Sequence[str] | None = (r"features\.0\.0", r"classifier\.1")


@dataclass(frozen=True)
class SwinT(Torchvision):
    """torchvision's Swin Transformer V2, tiny (Liu et al. 2022)."""

    decays: ClassVar[str] = "matrices"  # Liu et al. 2022, in their code

    form: Annotated[
        str,
        "auto, imagenet, or cifar: patches of 2 pixels, windows of 4 (auto: for up to 64 pixels)",
    ] = "auto"
    include: Annotated[
        Sequence[str] | None,
        "feed-forward layers only (regular expressions for whole module names); null = all; "
        r"attention: '.*\.attn\.(qkv|proj)'",
    ] = (r".*\.mlp\.\d",)
    exclude: Sequence[str] | None = (r"features\.0\.0", "head")


@dataclass(frozen=True)
class SwinB(SwinT):
    """torchvision's Swin Transformer V2, base (Liu et al. 2022), 88 million parameters."""


@dataclass(frozen=True)
class Timm(Model):
    """Any network of timm (pip install nmrun[timm])."""

    decays: ClassVar[str] = "matrices"  # timm's own training, for all networks
    trained: ClassVar[bool] = True

    name_in_timm: Annotated[str, TEXT, "the first argument of timm.create_model"] = (
        "vit_tiny_patch16_224"
    )
    options: Annotated[
        dict[str, Any] | None,
        ARGUMENTS,
        "further keyword arguments of timm.create_model, such as {patch_size: 4}; null = none",
    ] = None
    exclude: Annotated[
        Sequence[str] | None, "first and last layer, by the names that they mostly have"
    ] = (r"conv1|conv_stem|stem\..*|conv0|patch_embed\.proj", r"fc|classifier|head|head\.fc")
