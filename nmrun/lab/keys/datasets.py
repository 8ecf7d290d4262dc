"""The keys of data sets: what several have in common, and those of images. Texts are in ``texts``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from nmrun.lab.keys.fields import built
from nmrun.lab.keys.groups import Group, Named
from nmrun.lab.keys.ranges import PATH
from nmrun.ranges import FLAG, number, whole

Keys = TypeVar("Keys", bound=Group)
SHARE = number(0, 0.5, open_low=True)
# what a data set has, and a model takes
IMAGES, TEXTS, RUNNING_TEXT = "images", "texts with labels", "running text"
CLASSES = "a folder of images for each class, or train and val with such"


@dataclass(frozen=True)
class Dataset(Named):
    """A data set.

    Attributes:
        data: what is in it.
        train_images: images to train with, before any are put aside; None where that depends.
        within: what is in the folder ``dataset.path`` in NMRUN_DATA or anywhere; empty where the
            data set has no such key.
        places: the keys that name another file or folder.
        builder: of an installed package's, the dotted path of what builds its task.
    """

    data: ClassVar[str] = IMAGES
    train_images: ClassVar[int | None] = None
    within: ClassVar[str] = ""
    places: ClassVar[tuple[str, ...]] = ()
    builder: ClassVar[str] = ""

    def as_kind(self, kind: type[Keys]) -> Keys:
        """The keys of ``kind``, which a data set of the user's own may have as well.

        Args:
            kind: a class of keys: a data set's, or that of some keys.

        Raises:
            ConfigError: for keys that are not there.
        """
        return self if isinstance(self, kind) else built(kind, self.mapping(), "dataset")


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

    split_seed: Annotated[
        int,
        whole(0),
        "which images are for training, validation and test; not changed by the run's seed",
    ] = 0


@dataclass(frozen=True)
class Fractions(Group):
    """What is cut from a data set for validation and test."""

    val_fraction: Annotated[float, SHARE] = 0.05
    test_fraction: Annotated[float, SHARE] = 0.05


@dataclass(frozen=True)
class Subset(Seeded):
    """How many images each part has."""

    train_size: Annotated[
        int | None,
        whole(1, optional=True),
        "a subset with the same number of every class; null = all that are not for validation",
    ] = None
    val_size: Annotated[
        int | None,
        whole(1, optional=True),
        "images taken from those for training; null = a tenth of each class",
    ] = None
    test_size: Annotated[
        int | None, whole(1, optional=True), "a subset of the test images; null = all"
    ] = None

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

    flip: Annotated[bool, FLAG, "left and right, in every second training image"] = True
    randaugment: Annotated[int, whole(0), "operations of RandAugment in a row; 0 = off"] = 0
    randaugment_magnitude: Annotated[int, whole(0, 30), "their strength, 0 to 30"] = 9
    erasing: Annotated[float, number(0, 1), "probability of random erasing"] = 0.0
    mixup: Annotated[float, number(0), "mixup's alpha; 0 = off"] = 0.0
    cutmix: Annotated[
        float, number(0), "cutmix's alpha; 0 = off. With both, each batch has one of them"
    ] = 0.0


@dataclass(frozen=True)
class Digits(Fractions, Seeded, Dataset):
    """scikit-learn's digits: 1,797 real 8x8 grey images of handwritten digits, shipped with the
    library.
    """

    train_images: ClassVar[int | None] = 1797

    val_fraction: Annotated[float, "of all images"] = 0.15
    test_fraction: Annotated[float, "of all images"] = 0.2


@dataclass(frozen=True)
class Images(Augmented, Subset, Dataset):
    """Images of classes, all of which fit into memory."""

    crop_padding: Annotated[
        int,
        whole(0),
        "black pixels around a training image, of which a window is cut out at random",
    ] = 0


@dataclass(frozen=True)
class Cifar10(Images):
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 in 10 classes, from NMRUN_DATA: as
    torchvision stores them, or as images (cifar10/cifar10-jpeg or cifar10-jpeg.tar.xz; JPEG loses a
    little); downloaded by torchvision if neither is there.
    """

    train_images: ClassVar[int | None] = 50_000

    crop_padding: int = 4


@dataclass(frozen=True)
class Cifar100(Images):
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 in 100 classes; downloaded to
    NMRUN_DATA if it is not there.
    """

    train_images: ClassVar[int | None] = 50_000

    crop_padding: int = 4


@dataclass(frozen=True)
class FashionMNIST(Images):
    """Fashion-MNIST: 60,000 training and 10,000 test grey images of 28x28 in 10 classes; downloaded
    to NMRUN_DATA if it is not there.
    """

    train_images: ClassVar[int | None] = 60_000


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Images):
    """A folder with train, val and test (the latter two need not be there) or no such division, and
    in it a folder of images for each class.
    """

    within: ClassVar[str] = CLASSES

    path: Annotated[
        str,
        PATH,
        "of the folder or of a tar archive of it, in NMRUN_DATA or else in the current folder",
    ]
    resolution: Annotated[
        int,
        whole(1),
        "pixels of a side: images of another size are scaled, and the middle is cut out",
    ] = 32


@dataclass(frozen=True)
class ImageNet(Augmented, Subset, Dataset):
    """ImageNet, or any other large image folder with train and val, read from the disk as it is
    needed.
    """

    within: ClassVar[str] = CLASSES

    path: Annotated[str, PATH, "of the folder, in NMRUN_DATA or else in the current folder"] = (
        "imagenet"
    )
    resolution: Annotated[int, whole(1), "pixels of a side"] = 224
    crop_scale: Annotated[
        float,
        number(0, 1, open_low=True),
        "least part of a training image's area that is cut out at random",
    ] = 0.08
    workers: Annotated[
        int | None,
        whole(0, optional=True),
        "processes that read; of each rank; null = one a core, shared by the ranks of a machine; "
        "0 = none but the training itself",
    ] = None
    val_size: Annotated[
        int | None,
        "images taken from those for training, with the same number of every class; null = a tenth "
        "of each class",
    ] = 10_000
    test_size: Annotated[
        int | None, "a subset of the test images, which are those of val; null = all"
    ] = None
