"""The keys of each data set: the config's group ``dataset``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from nmrun.lab.keys import reader
from nmrun.lab.keys.data_groups import (
    TEXTS,
    Augmented,
    Dataset,
    Encoded,
    Fractions,
    OwnDataset,
    Seeded,
    Subset,
)
from nmrun.lab.keys.installed import Kinds
from nmrun.lab.keys.long_texts import (
    HubText,
    Shakespeare,
    StdlibText,
    TextFiles,
    TokenBin,
    WikiText,
)
from nmrun.ranges import PATH, number, one_of, whole

CLASSES = "a folder of images for each class, or train and val with such"


@dataclass(frozen=True)
class Digits(Fractions, Seeded, Dataset):
    """scikit-learn's digits."""


@dataclass(frozen=True)
class Images(Augmented, Subset, Dataset):
    """CIFAR and Fashion-MNIST."""

    crop_padding: Annotated[int, whole(0)]


@dataclass(frozen=True)
class ImageFolder(Images):
    """A folder of images."""

    within: ClassVar[str] = CLASSES

    path: Annotated[str, PATH]
    resolution: Annotated[int, whole(1)]


@dataclass(frozen=True)
class ImageNet(Augmented, Subset, Dataset):
    """A large folder of images, which are read as they are needed."""

    within: ClassVar[str] = CLASSES

    path: Annotated[str, PATH]
    resolution: Annotated[int, whole(1)]
    crop_scale: Annotated[float, number(0, 1, open_low=True)]
    workers: Annotated[int | None, whole(0, optional=True)]


@dataclass(frozen=True)
class GeneratedText(Encoded, Seeded, Dataset):
    """Generated reviews."""

    data: ClassVar[str] = TEXTS

    size: Annotated[int, whole(1)]


@dataclass(frozen=True)
class Glue(Encoded, Seeded, Dataset):
    """A task of GLUE."""

    data: ClassVar[str] = TEXTS

    task: Annotated[
        str, one_of("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")
    ]
    held_out: Annotated[float, number(0, 0.5)]
    limit: Annotated[int | None, whole(1, optional=True)]


OWN: dict[str, type[Dataset]] = {
    "digits": Digits,
    **dict.fromkeys(("cifar10", "cifar100", "fashion_mnist"), Images),
    "image_folder": ImageFolder,
    "imagenet": ImageNet,
    "generated_text": GeneratedText,
    "glue": Glue,
    "stdlib_text": StdlibText,
    "text": TextFiles,
    "hub_text": HubText,
    "shakespeare": Shakespeare,
    **dict.fromkeys(("wikitext2", "wikitext103"), WikiText),
    "token_bin": TokenBin,
}
DATASETS = Kinds("dataset", OWN)


def read(plain: Mapping[str, Any]) -> Dataset:
    """The data set of a checked config's ``dataset`` group."""
    if "_target_" not in plain:
        return reader.built(DATASETS[plain["name"]], plain, "dataset")
    options = {key: value for key, value in plain.items() if key not in ("name", "_target_")}
    return OwnDataset(plain["name"], plain["_target_"], options)
