"""The keys of each data set: the config's group ``dataset``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from nmrun.lab.keys import reader
from nmrun.lab.keys.data_groups import (
    ANSWERED,
    FRAMES,
    INSTANCES,
    PAIRS,
    QUESTIONS,
    SHARE,
    TEXTS,
    Augmented,
    Dataset,
    Encoded,
    Fractions,
    Moving,
    OwnDataset,
    Pictured,
    Seeded,
    Subset,
    Translated,
    Windowed,
)
from nmrun.lab.keys.long_texts import (
    HubText,
    Shakespeare,
    StdlibText,
    Strided,
    TextFiles,
    TokenBin,
    WikiText,
)
from nmrun.ranges import FLAG, OPTIONAL_TEXT, PATH, TEXT, number, one_of, whole


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

    path: Annotated[str, PATH]
    resolution: Annotated[int, whole(1)]


@dataclass(frozen=True)
class ImageNet(Augmented, Subset, Dataset):
    """A large folder of images, which are read as they are needed."""

    path: Annotated[str, PATH]
    resolution: Annotated[int, whole(1)]
    crop_scale: Annotated[float, number(0, 1, open_low=True)]
    workers: Annotated[int | None, whole(0, optional=True)]


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

    path: Annotated[str, PATH]
    train: Annotated[str, PATH]
    test: Annotated[str, PATH]
    held_out: Annotated[float, SHARE]
    limit: Annotated[int | None, whole(1, optional=True)]
    workers: Annotated[int | None, whole(0, optional=True)]


@dataclass(frozen=True)
class GeneratedMotion(Moving, Dataset):
    """Generated pairs of frames."""

    data: ClassVar[str] = FRAMES

    size: Annotated[int, whole(1)]
    resolution: Annotated[int, whole(32)]


@dataclass(frozen=True)
class Sintel(Fractions, Moving, Dataset):
    """Sintel."""

    data: ClassVar[str] = FRAMES

    path: Annotated[str | None, OPTIONAL_TEXT]
    rendering: Annotated[str, one_of("clean", "final", "both")]
    workers: Annotated[int | None, whole(0, optional=True)]


@dataclass(frozen=True)
class FlyingChairs(Moving, Dataset):
    """FlyingChairs."""

    data: ClassVar[str] = FRAMES

    path: Annotated[str | None, OPTIONAL_TEXT]
    held_out: Annotated[float, SHARE]
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


@dataclass(frozen=True)
class GlueText(Glue):
    """A task of GLUE as text to text."""

    data: ClassVar[str] = ANSWERED


@dataclass(frozen=True)
class GeneratedQuestions(Windowed, Seeded, Dataset):
    """Generated questions."""

    data: ClassVar[str] = QUESTIONS

    size: Annotated[int, whole(1)]


@dataclass(frozen=True)
class Squad(Windowed, Seeded, Dataset):
    """SQuAD."""

    data: ClassVar[str] = QUESTIONS

    version: Annotated[str, one_of("v1.1", "v2.0")]
    held_out: Annotated[float, SHARE]
    limit: Annotated[int | None, whole(1, optional=True)]


@dataclass(frozen=True)
class CopyReverse(Translated, Seeded, Dataset):
    """Generated sentences to be copied or reversed."""

    data: ClassVar[str] = PAIRS

    version: Annotated[int, whole(2, 2)]
    size: Annotated[int, whole(1)]
    val_size: Annotated[int, whole(1)]
    test_size: Annotated[int, whole(1)]
    words: Annotated[int, whole(1)]
    longest: Annotated[int, whole(2)]


@dataclass(frozen=True)
class Multi30k(Translated, Dataset):
    """Multi30k."""

    data: ClassVar[str] = PAIRS

    source: Annotated[str, TEXT]
    target: Annotated[str, TEXT]
    test: Annotated[str, TEXT]
    vocabulary: Annotated[int, whole(4)]


@dataclass(frozen=True)
class Fairseq(Translated, Dataset):
    """A folder of fairseq-preprocess."""

    data: ClassVar[str] = PAIRS

    path: Annotated[str, PATH]
    source: Annotated[str | None, OPTIONAL_TEXT]
    target: Annotated[str | None, OPTIONAL_TEXT]
    train: Annotated[str, PATH]
    val: Annotated[str | None, OPTIONAL_TEXT]
    test: Annotated[str | None, OPTIONAL_TEXT]
    subwords: Annotated[str, one_of("none", "sentencepiece", "subword_nmt")]
    moses: Annotated[bool, FLAG]


DATASETS: dict[str, type[Dataset]] = {
    "digits": Digits,
    **dict.fromkeys(("cifar10", "cifar100", "fashion_mnist"), Images),
    "image_folder": ImageFolder,
    "imagenet": ImageNet,
    "generated_shapes": GeneratedShapes,
    "coco": Coco,
    "generated_motion": GeneratedMotion,
    "sintel": Sintel,
    "flying_chairs": FlyingChairs,
    "generated_text": GeneratedText,
    "glue": Glue,
    "glue_text": GlueText,
    "generated_questions": GeneratedQuestions,
    "squad": Squad,
    "stdlib_text": StdlibText,
    "text": TextFiles,
    "hub_text": HubText,
    "shakespeare": Shakespeare,
    **dict.fromkeys(("wikitext2", "wikitext103"), WikiText),
    "token_bin": TokenBin,
    "copy_reverse": CopyReverse,
    "multi30k": Multi30k,
    "fairseq": Fairseq,
}
LONG_TEXTS = tuple(name for name, kind in DATASETS.items() if issubclass(kind, Strided))


def read(plain: Mapping[str, Any]) -> Dataset:
    """The data set of a checked config's ``dataset`` group."""
    if "_target_" not in plain:
        return reader.built(DATASETS[plain["name"]], plain, "dataset")
    options = {key: value for key, value in plain.items() if key not in ("name", "_target_")}
    return OwnDataset(plain["name"], plain["_target_"], options)
