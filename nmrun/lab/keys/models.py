"""The keys of each model: the config's group ``model``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from nmrun.lab.keys import reader
from nmrun.lab.keys.data_groups import (
    IMAGES,
    RUNNING_TEXT,
    TEXTS,
)
from nmrun.lab.keys.groups import Group, Named
from nmrun.lab.keys.installed import Kinds
from nmrun.ranges import EXPRESSIONS, FLAG, FRACTION, TEXT, WIDTHS, Check, one_of, whole

ARGUMENTS = Check(
    "null or keyword arguments such as {drop_path_rate: 0.1}",
    lambda value: isinstance(value, dict | None),
)


@dataclass(frozen=True)
class Model(Named):
    """What all models have: the modules that may be sparse.

    ``decays`` is which parameters its literature lets decay, for ``optimizer.decay=null``;
    ``data`` is what it takes, as data sets say it; ``trained``, whether it can come trained to the
    last layer.
    """

    decays: ClassVar[str] = "all"
    data: ClassVar[str] = IMAGES
    trained: ClassVar[bool] = False

    include: Annotated[list[str] | None, EXPRESSIONS]
    exclude: Annotated[list[str] | None, EXPRESSIONS]


@dataclass(frozen=True)
class OwnModel(Model):
    """A model of the user's own: ``target`` builds it, and knows the keys in ``options``."""

    target: str
    options: dict[str, Any]

    def values(self) -> dict[str, Any]:
        beside = {"_target_": self.target, "include": self.include, "exclude": self.exclude}
        return {**beside, **self.options}


@dataclass(frozen=True)
class Blocks(Group):
    """The size of a Transformer."""

    layers: Annotated[int, whole(1)]
    heads: Annotated[int, whole(1)]
    width: Annotated[int, whole(1)]
    dropout: Annotated[float, FRACTION]


@dataclass(frozen=True)
class SmallConv(Model):
    """The small convolutional network."""

    channels: Annotated[list[int], WIDTHS]


@dataclass(frozen=True)
class MLP(Model):
    """The perceptron."""

    hidden: Annotated[list[int], WIDTHS]


@dataclass(frozen=True)
class CifarResNet(Model):
    """ResNets for CIFAR."""

    depth: Annotated[int, whole(8)]


@dataclass(frozen=True)
class Torchvision(Model):
    """Networks of torchvision."""

    form: Annotated[str, one_of("auto", "cifar", "imagenet")]


@dataclass(frozen=True)
class Swin(Torchvision):
    """Swin Transformers."""

    decays: ClassVar[str] = "matrices"  # Liu et al. 2022, in their code


@dataclass(frozen=True)
class Timm(Model):
    """A network of timm."""

    decays: ClassVar[str] = "matrices"  # timm's own training, for all networks
    trained: ClassVar[bool] = True

    name_in_timm: Annotated[str, TEXT]
    options: Annotated[dict[str, Any] | None, ARGUMENTS]


@dataclass(frozen=True)
class Transformer(Blocks, Model):
    """A Transformer."""

    decays: ClassVar[str] = "matrices"  # nanoGPT; DeiT's code; BERT's code
    data: ClassVar[str] = TEXTS


@dataclass(frozen=True)
class Activated(Transformer):
    """A Transformer with a choice of activation; that of texts has no other keys."""

    activation: Annotated[str, one_of("gelu", "relu2")]


@dataclass(frozen=True)
class GPT(Activated):
    """GPT-2's architecture."""

    data: ClassVar[str] = RUNNING_TEXT

    bias: Annotated[bool, FLAG]


@dataclass(frozen=True)
class GPTClassifier(GPT):
    """GPT-2's architecture with a head for classes."""

    data: ClassVar[str] = TEXTS

    context: Annotated[int, whole(1)]
    embeddings: Annotated[int | None, whole(4, optional=True)]


@dataclass(frozen=True)
class ViT(Activated):
    """Vision Transformers."""

    data: ClassVar[str] = IMAGES

    patch: Annotated[int | None, whole(1, optional=True)]
    stochastic_depth: Annotated[float, FRACTION]


@dataclass(frozen=True)
class Causal(Model):
    """A language model of Hugging Face, with the dropout that it came with."""

    decays: ClassVar[str] = "matrices"  # BERT's code, and the Trainer of transformers
    data: ClassVar[str] = RUNNING_TEXT
    trained: ClassVar[bool] = True

    pretrained: Annotated[str, TEXT]


@dataclass(frozen=True)
class Pretrained(Causal):
    """A network of Hugging Face."""

    dropout: Annotated[float, FRACTION]


@dataclass(frozen=True)
class Encoder(Pretrained):
    """An encoder of Hugging Face with a new head."""

    data: ClassVar[str] = TEXTS
    trained: ClassVar[bool] = False

    pooling: Annotated[str, one_of("cls", "mean", "similarity")]


VISION = [
    "resnet18",
    "resnet34",
    "resnet50",
    "densenet121",
    "vgg16_bn",
    "mobilenet_v2",
]
GPTS = ["gpt_tiny", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"]
OWN: dict[str, type[Model]] = {
    "small_conv": SmallConv,
    "small_conv_bn": SmallConv,
    "mlp": MLP,
    **dict.fromkeys(("resnet20", "resnet32"), CifarResNet),
    **dict.fromkeys(VISION, Torchvision),
    **dict.fromkeys(("swin_v2_t", "swin_v2_b"), Swin),
    **dict.fromkeys(("vit_tiny", "vit_small", "vit_base", "deit_tiny", "deit_small"), ViT),
    "timm": Timm,
    "text_encoder": Activated,
    **dict.fromkeys(GPTS, GPT),
    "gpt_classifier": GPTClassifier,
    "hf_encoder": Encoder,
    "hf_gpt2": Pretrained,
    "hf_causal": Causal,
}
MODELS = Kinds("model", OWN)


def read(plain: Mapping[str, Any]) -> Model:
    """The model of a checked config's ``model`` group."""
    if "_target_" not in plain:
        return reader.built(MODELS[plain["name"]], plain, "model")
    own = ("name", "_target_", "include", "exclude")
    options = {key: value for key, value in plain.items() if key not in own}
    return OwnModel(plain["name"], plain["include"], plain["exclude"], plain["_target_"], options)
