"""The keys of each data set: the config's group ``dataset``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from nmrun.ranges import FLAG, OPTIONAL_TEXT, PATH, TEXT, number, one_of, whole
from nmrun.settings import reader
from nmrun.settings.groups import Group, Named

Keys = TypeVar("Keys", bound=Group)
SHARE = number(0, 0.5, open_low=True)
# what a data set has, and a model takes
IMAGES, TEXTS = "images", "texts with labels"
RUNNING_TEXT, PAIRS = "running text", "pairs of sentences"


@dataclass(frozen=True)
class Dataset(Named):
    """A data set. ``data`` is what is in it."""

    data: ClassVar[str] = IMAGES

    def as_kind(self, kind: type[Keys]) -> Keys:
        """The keys of ``kind``, which a data set of the user's own may have as well.

        Args:
            kind: a class of this module: a data set's, or that of some keys.

        Raises:
            ConfigError: for keys that are not there.
        """
        return self if isinstance(self, kind) else reader.built(kind, self.mapping(), "dataset")


@dataclass(frozen=True)
class OwnDataset(Dataset):
    """A data set of the user's own: ``target`` builds its task and knows its ``options``."""

    target: str
    options: dict[str, Any]

    def values(self) -> dict[str, Any]:
        return dict(self.options)


@dataclass(frozen=True)
class Seeded(Group):
    """How a data set is divided."""

    split_seed: Annotated[int, whole(0)]


@dataclass(frozen=True)
class Subset(Seeded):
    """How many images each part has."""

    train_size: Annotated[int | None, whole(1, optional=True)]
    val_size: Annotated[int | None, whole(1, optional=True)]
    test_size: Annotated[int | None, whole(1, optional=True)]

    def sizes(self) -> dict[str, Any]:
        """The arguments of ``nmrun.data.images.split``."""
        return {
            "split_seed": self.split_seed,
            "train_size": self.train_size,
            "val_size": self.val_size,
            "test_size": self.test_size,
        }


@dataclass(frozen=True)
class Augmented(Group):
    """How training images are augmented; see ``nmrun.tasks.augment.Augment``."""

    flip: Annotated[bool, FLAG]
    randaugment: Annotated[int, whole(0)]
    randaugment_magnitude: Annotated[int, whole(0, 30)]
    erasing: Annotated[float, number(0, 1)]
    mixup: Annotated[float, number(0)]
    cutmix: Annotated[float, number(0)]


@dataclass(frozen=True)
class Context(Group):
    """What language models look back on."""

    context: Annotated[int, whole(1)]


@dataclass(frozen=True)
class Tokenized(Context):
    """A text that is made into tokens."""

    tokenizer: Annotated[str, TEXT]


@dataclass(frozen=True)
class Fractions(Group):
    """What is cut from a data set for validation and test."""

    val_fraction: Annotated[float, SHARE]
    test_fraction: Annotated[float, SHARE]


@dataclass(frozen=True)
class Encoded(Group):
    """Texts for classification."""

    max_length: Annotated[int, whole(8)]
    tokenizer: Annotated[str, TEXT]
    vocabulary: Annotated[int, whole(4)]


@dataclass(frozen=True)
class Translated(Group):
    """Batches and beam search of translation."""

    max_tokens: Annotated[int, whole(1)]
    beam: Annotated[int, whole(1)]
    length_penalty: Annotated[float, number(0)]


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
class StdlibText(Context, Dataset):
    """The source of Python's standard library."""

    data: ClassVar[str] = RUNNING_TEXT

    sha256: Annotated[str, TEXT]


@dataclass(frozen=True)
class WikiText(Tokenized, Dataset):
    """WikiText-2 and WikiText-103."""

    data: ClassVar[str] = RUNNING_TEXT


@dataclass(frozen=True)
class Shakespeare(Fractions, Tokenized, Dataset):
    """Tiny Shakespeare."""

    data: ClassVar[str] = RUNNING_TEXT


@dataclass(frozen=True)
class TextFiles(Fractions, Tokenized, Dataset):
    """Any text files."""

    data: ClassVar[str] = RUNNING_TEXT

    train: Annotated[str, PATH]
    val: Annotated[str | None, OPTIONAL_TEXT]
    test: Annotated[str | None, OPTIONAL_TEXT]


@dataclass(frozen=True)
class TokenBin(Context, Dataset):
    """Files of tokens."""

    data: ClassVar[str] = RUNNING_TEXT

    folder: Annotated[str, PATH]
    vocabulary: Annotated[int, whole(4)]


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
    "generated_text": GeneratedText,
    "glue": Glue,
    "stdlib_text": StdlibText,
    "text": TextFiles,
    "shakespeare": Shakespeare,
    **dict.fromkeys(("wikitext2", "wikitext103"), WikiText),
    "token_bin": TokenBin,
    "copy_reverse": CopyReverse,
    "multi30k": Multi30k,
    "fairseq": Fairseq,
}


def read(plain: Mapping[str, Any]) -> Dataset:
    """The data set of a checked config's ``dataset`` group."""
    if "_target_" not in plain:
        return reader.built(DATASETS[plain["name"]], plain, "dataset")
    options = {key: value for key, value in plain.items() if key not in ("name", "_target_")}
    return OwnDataset(plain["name"], plain["_target_"], options)
