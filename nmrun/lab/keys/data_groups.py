"""The keys that several data sets have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from nmrun.lab.keys import reader
from nmrun.lab.keys.groups import Group, Named
from nmrun.ranges import FLAG, TEXT, number, whole

Keys = TypeVar("Keys", bound=Group)
SHARE = number(0, 0.5, open_low=True)
# what a data set has, and a model takes
IMAGES, TEXTS, RUNNING_TEXT = "images", "texts with labels", "running text"


@dataclass(frozen=True)
class Dataset(Named):
    """A data set. ``data`` is what is in it; ``within``, what is in the folder ``dataset.path`` in
    NMRUN_DATA or anywhere, empty where the data set has no such key; ``places``, the keys that name
    another file or folder.
    """

    data: ClassVar[str] = IMAGES
    within: ClassVar[str] = ""
    places: ClassVar[tuple[str, ...]] = ()

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
        """The arguments of ``nmrun.lab.tasks.vision.images.split``."""
        return {
            "split_seed": self.split_seed,
            "train_size": self.train_size,
            "val_size": self.val_size,
            "test_size": self.test_size,
        }


@dataclass(frozen=True)
class Augmented(Group):
    """How training images are augmented; see ``nmrun.lab.tasks.vision.augmentation.Augment``."""

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
