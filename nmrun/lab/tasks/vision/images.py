"""Data sets of images: scikit-learn's digits, torchvision's files, and folders, one a class.

They are held in memory, but for ImageNet, which is read from the disk during training.
"""

from __future__ import annotations

import importlib.util
import lzma
import os
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.datasets import Digits, ImageFolder, ImageNet, Images, Subset
from nmrun.lab.runs import documents, locks
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.vision.classification import Classification, in_8_bits

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.vision.stream import ImageStream

Labelled = tuple[Tensor, Tensor]  # images and their classes
FILES = {  # torchvision's class, the folder of its files, and images under other names
    "cifar10": (
        "CIFAR10",
        "cifar-10-batches-py",
        ("cifar10/cifar10-jpeg", "cifar10/cifar10-jpeg.tar.xz"),
    ),
    "cifar100": ("CIFAR100", "cifar-100-python", ()),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST", ()),
}


def torchvision_files(config: Config, device: torch.device) -> Classification:
    options = config.dataset.as_kind(Images)
    pool, test, names, place = read_torchvision(options.name)
    classes = len(names)
    splits = split(pool, test, classes, options)
    prepared: dict[str, Any] = {"colours": "RGB" if pool[0].shape[1] == 3 else "grey"}
    if options.resolution is not None:
        splits = {
            name: (scaled(images, options.resolution), labels)
            for name, (images, labels) in splits.items()
        }
        prepared |= _resized(options.resolution)
    shape = splits["train"][0].shape[1:]
    return Classification.of(
        config,
        splits,
        classes,
        device,
        about=about(splits, shape, classes, place),
        names=names,
        prepared=prepared,
    )


def _resized(side: int) -> dict[str, Any]:
    """What a network's ``input`` says of images that become squares."""
    return {"resize": {"shorter_side": side, "crop": side}}


def scaled(images: Tensor, size: int) -> Tensor:
    """Square images, uint8 (N, C, side, side), with ``size`` pixels of a side: bilinear, with
    antialiasing, as :func:`decode` scales. Raises ConfigError for more than half of the memory.
    """
    _check_memory(len(images), images.shape[1], size)
    return nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


def read_torchvision(name: str) -> tuple[Labelled, Labelled, list[str], Path]:
    """Training and test images of ``FILES``, uint8 (N, C, H, W) with int64 labels (N,), the names
    of the classes, and where they lie.

    They are looked for in ``NMRUN_DATA`` itself and in its folder of that name, and downloaded to
    the latter by torchvision. Raises ConfigError where they are neither here nor to be downloaded,
    or damaged.
    """
    _, folder, others = FILES[name]
    place = storage.path_of(f"{name}/{folder}", folder, *others)
    if not place.exists():
        place = _download(name)
    if any(place.match(other) for other in others):
        splits, classes = load_folder(place, size=32)
        return splits["train"], splits["test"], classes, place
    try:
        train, names = _of_torchvision(name, place.parent, train=True)
        test, _ = _of_torchvision(name, place.parent, train=False)
    except (RuntimeError, ValueError, AssertionError, EOFError, OSError) as error:
        problem = str(error).split(". ")[0] or "damaged"
        raise ConfigError(
            f"dataset={name}: {place}: {problem}; remove it, and it is downloaded anew"
        ) from None
    return train, test, names, place


def _of_torchvision(
    name: str, root: Path, train: bool, download: bool = False
) -> tuple[Labelled, list[str]]:
    from torchvision import datasets

    source = getattr(datasets, FILES[name][0])(root, train=train, download=download)
    images = torch.as_tensor(source.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    labelled = images.contiguous(), torch.as_tensor(source.targets, dtype=torch.int64)
    return labelled, list(source.classes)


def _download(name: str) -> Path:
    """Download below ``NMRUN_DATA``; nothing half-done is left there."""
    root, place = storage.data_folder(), storage.data_folder() / name / FILES[name][1]
    failed = f"dataset={name}: it is not in {root} (NMRUN_DATA), and its download failed: "
    with refused(failed, OSError, RuntimeError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with locks.folder_beside(place) as part:
            _of_torchvision(name, part, train=True, download=True)
            if not place.exists():  # another process may have downloaded it first
                os.rename(part / place.name, place)
    return place


DIGITS = 10


@cache
def load_digits(
    split_seed: int = Digits.split_seed,
    val_fraction: float = Digits.val_fraction,
    test_fraction: float = Digits.test_fraction,
) -> tuple[dict[str, Labelled], float, float]:
    """scikit-learn's 1,797 digits by split: float32 (N, 1, 8, 8) and int64 labels (N,); and mean and
    standard deviation of the training images' pixels, 0 to 16, by which all are normalised.

    They are split by ``split_seed`` alone, and every class alike, so all runs of a comparison see
    the same test images.
    """
    images, labels = _read_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    members: dict[str, list[Tensor]] = {"test": [], "val": [], "train": []}
    for digit in range(DIGITS):
        of_class = order[labels[order] == digit]
        test, val = (round(share * len(of_class)) for share in (test_fraction, val_fraction))
        sizes = [test, val, len(of_class) - test - val]
        if min(sizes) < 1:
            raise ConfigError(
                f"dataset.val_fraction={val_fraction} and dataset.test_fraction={test_fraction} "
                "leave no image of a class for a split"
            )
        for part, rows in zip(members.values(), of_class.split(sizes), strict=True):
            part.append(rows)
    split_rows = {name: torch.cat(parts) for name, parts in members.items()}
    train = images[split_rows["train"]]
    mean, std = float(train.mean()), float(train.std())
    splits = {
        name: ((images[rows] - mean) / std, labels[rows]) for name, rows in split_rows.items()
    }
    return splits, mean, std


def digits(config: Config, device: torch.device) -> Classification:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    options = config.dataset.as_kind(Digits)
    splits, mean, std = load_digits(options.split_seed, options.val_fraction, options.test_fraction)
    return Classification.of(
        config,
        splits,
        DIGITS,
        device,
        names=[str(digit) for digit in range(DIGITS)],
        prepared={"colours": "grey", "range": [0, 16], "mean": [mean], "std": [std]},
    )


def _read_digits() -> tuple[Tensor, Tensor]:
    """Images (0 to 16) and labels as of sklearn, without the seconds that its import takes."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=","))
    return table[:, :-1].float().view(-1, 1, 8, 8), table[:, -1].long()


SPLITS = ("train", "val", "test")


def image_folder(config: Config, device: torch.device) -> Classification:
    options = config.dataset.as_kind(ImageFolder)
    place = storage.path_of(options.path)
    splits, names = load_folder(place, options.resolution)
    shape, classes = splits["train"][0].shape[1:], len(names)
    if "test" not in splits and "val" in splits:
        splits["test"] = splits.pop("val")  # as ImageNet, whose test labels nobody has
    test, val = splits.get("test"), splits.get("val")
    parts = split(splits["train"], test, classes, options, val)
    return Classification.of(
        config,
        parts,
        classes,
        device,
        about=about(parts, shape, classes, place),
        names=names,
        prepared={"colours": "RGB", **_resized(shape[-1])},
    )


def imagenet(config: Config, device: torch.device) -> ImageStream:
    """ImageNet and other large folders. ``val`` is the test split, as labels of ImageNet's test
    images are nowhere; validation images are taken from those for training.
    """
    from nmrun.lab.tasks.vision.stream import ImageStream

    options = config.dataset.as_kind(ImageNet)
    place = storage.path_of(options.path)
    names, listed = listing(place, ("train", "val"))
    if "val" not in listed:
        raise ConfigError(
            f"dataset.path={options.path}: there is no {place / 'train'} with a {place / 'val'} "
            "beside it, and in each a folder of images for every class"
        )
    samples = listed["train"] + listed["val"]
    paths = np.array([path.encode() for path, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    rows, trained, classes = torch.arange(len(samples)), len(listed["train"]), len(names)
    pool, test = (rows[:trained], labels[:trained]), (rows[trained:], labels[trained:])
    parts = split(pool, test, classes, options)
    description = about(parts, (3, options.resolution, options.resolution), classes, place)
    return ImageStream(config, paths, parts, classes, device, description, names)


PHOTO, SMALL = 224, 64  # the side of photos, and what images may have that keep their size


def load_folder(place: Path, size: int | None) -> tuple[dict[str, Labelled], list[str]]:
    """All images of a folder, or of a tar archive of one, centred and scaled to ``size`` pixels a
    side, of None to those of ``dataset.resolution=null``: uint8 (N, 3, size, size) and int64 labels
    (N,) of the splits that are there, and the names of the classes. They are decoded once, and cached.

    The folder has a folder for each of ``train``, ``val`` and ``test`` (some may be missing) with
    one for each class in it. Or it has the classes' folders themselves, all of which is ``train``
    then. Raises ConfigError for a folder that is not so.
    """
    if place.is_file():
        arrays = storage.cached(["images of 8 bits", size], [place], lambda: _unpack(place, size))
    else:
        classes, listed = listing(place)
        paths = [Path(path) for samples in listed.values() for path, _ in samples]
        # links may bring the same files under other classes
        labels = {part: [label for _, label in samples] for part, samples in listed.items()}
        arrays = storage.cached(
            ["images of 8 bits", size, classes, labels],
            paths,
            lambda: _decode_all(classes, listed, size),
        )
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    splits = {
        part: (tensors[f"{part}_images"], tensors[f"{part}_labels"])
        for part in SPLITS
        if f"{part}_images" in tensors
    }
    return splits, os.fsdecode(arrays["classes"].tobytes()).split(os.sep)


def listing(
    place: Path, parts: Sequence[str] = SPLITS
) -> tuple[list[str], dict[str, list[tuple[str, int]]]]:
    """The names of a folder's classes, and paths and class numbers of the images of each of the
    ``parts`` that is there.

    Raises ConfigError for a folder without classes, for splits without ``train``, and for splits
    with different classes.
    """
    from torchvision.datasets import ImageFolder

    folders = {part: place / part for part in parts if (place / part).is_dir()}
    if "train" not in folders:
        if folders:
            raise ConfigError(
                f"{place}: there is {' and '.join(folders)} and no train: name the folder of training "
                f"images train, or, if {next(iter(folders))} is a class, put the classes into a folder train"
            )
        folders = {"train": place}
    classes: list[str] = []
    listed: dict[str, list[tuple[str, int]]] = {}
    for part, folder in folders.items():
        with refused(f"{folder}: ", OSError):
            source = ImageFolder(str(folder))
        classes = classes or source.classes
        if source.classes != classes:
            odd = sorted({*source.classes} ^ {*classes})[0]
            raise ConfigError(
                f"{place}: train and {part} have not the same classes, for instance {odd}"
            )
        listed[part] = source.samples
    return classes, listed


def _decode_all(
    classes: list[str], listed: dict[str, list[tuple[str, int]]], size: int | None
) -> dict[str, NDArray[Any]]:
    if size is None:
        size = _usual_side([path for samples in listed.values() for path, _ in samples])
    names = os.fsencode(os.sep.join(classes))  # which no name of a folder has in it
    arrays: dict[str, NDArray[Any]] = {"classes": np.frombuffer(names, np.uint8)}
    for part, samples in listed.items():
        arrays[f"{part}_images"] = _pixels([path for path, _ in samples], size)
        arrays[f"{part}_labels"] = np.array([label for _, label in samples])
    return arrays


def _usual_side(paths: Sequence[str]) -> int:
    """The shorter side of the median image, by the heads of the files alone; of photos ``PHOTO``."""
    from PIL import Image

    def shorter(path: str) -> int:
        with Image.open(path) as file:
            return min(file.size)

    kinds = OSError, SyntaxError, Image.DecompressionBombError
    with ThreadPoolExecutor() as threads, refused("", *kinds):
        sides = sorted(threads.map(shorter, paths))
    median = sides[len(sides) // 2]
    return median if median <= SMALL else PHOTO


def _pixels(paths: Sequence[str], size: int) -> NDArray[np.uint8]:
    """uint8 (N, 3, size, size). Raises ConfigError for a file that cannot be decoded, and for more
    than half of the memory.
    """
    _check_memory(len(paths), 3, size)
    pixels = np.empty((len(paths), 3, size, size), np.uint8)

    def fill(row: int) -> None:
        pixels[row] = np.moveaxis(decode(paths[row], size), 2, 0)

    with ThreadPoolExecutor() as threads, refused("", OSError):
        list(threads.map(fill, range(len(paths))))
    return pixels


def decode(path: str, size: int) -> NDArray[np.uint8]:
    """An image as uint8 (size, size, 3): scaled until its shorter side fits, and the middle cut
    out. Raises OSError with the file's name, and ConfigError as :func:`in_8_bits`.
    """
    from PIL import Image, ImageOps

    try:
        with documents.opened(path) as content, Image.open(content) as file:
            image = in_8_bits(file, path)
        return np.asarray(
            image
            if image.size == (size, size)
            else ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        )
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(f"{path} is damaged, or not an image ({error})") from None


def _unpack(archive: Path, size: int | None) -> dict[str, NDArray[Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="nmrun-") as folder,
        refused(
            f"{archive} cannot be unpacked: ",
            *(tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError),
        ),
    ):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
            # tarfile takes a damaged header for the end, and does not look at a checksum after it
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            while rest := tar.fileobj.read(1 << 20):
                if rest.strip(b"\0"):
                    raise OSError("it is damaged")
        inside = Path(folder)
        while len(entries := list(inside.iterdir())) == 1 and entries[0].is_dir():
            inside = entries[0]
        return _decode_all(*listing(inside), size)


def _check_memory(count: int, channels: int, size: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if count * channels * size * size > memory / 2:
        raise ConfigError(
            f"{count} images of dataset.resolution={size} do not fit into memory; dataset=imagenet reads as it trains"
        )


def split(
    pool: Labelled,
    test: Labelled | None,
    classes: int,
    options: Subset,
    val: Labelled | None = None,
) -> dict[str, Labelled]:
    """Split images, by ``split_seed`` alone.

    The sizes of ``options`` are numbers of images, with the same number of every class, or one more of the first ones.
    None is all the rest for training, and for the others all that are given, or a tenth of each
    class of the pool. A smaller training set is part of a larger one. Raises ConfigError for a
    class that has too few images.
    """
    splits, rest = {}, pool
    for name, part, size in (
        ("test", test, options.test_size),
        ("val", val, options.val_size),
        ("train", None, options.train_size),
    ):
        source = rest if part is None else part
        counts = torch.bincount(source[1], minlength=classes)
        if size is not None:
            quotas = torch.tensor(
                [size // classes + (number < size % classes) for number in range(classes)]
            )
            for number in (quotas > counts).nonzero()[:1, 0].tolist():
                raise ConfigError(
                    f"dataset.{name}_size={size}: {int(quotas[number])} images of class {number}, of which there are {counts[number]}"
                )
        else:
            quotas = counts if part is not None or name == "train" else (counts / 10).round().long()
        rows, others = _take(source[1], quotas, options.split_seed)
        splits[name] = source[0][rows], source[1][rows]
        if part is None:
            rest = source[0][others], source[1][others]
    empty = [name for name, (images, _) in splits.items() if not len(images)]
    if empty:
        raise ConfigError(
            f"dataset.{empty[0]}_size: no image is left for it of the {len(pool[1])} that there are"
        )
    return splits


def _take(labels: Tensor, quotas: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows with ``quotas`` of each class, in random order, and all others."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = labels[order].argsort(stable=True)  # rows of ``order``, class by class
    counts = torch.bincount(labels, minlength=len(quotas))
    rank = torch.arange(len(labels)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[by_class] = rank < torch.repeat_interleave(quotas, counts)
    return order[mask], order[~mask]


def about(splits: dict[str, Labelled], shape: Sequence[int], classes: int, place: Path) -> str:
    """A line of the plan on the data; ``shape`` is (C, H, W)."""
    counts = ", ".join(f"{len(splits[name][1]):,} {name}" for name in ("train", "val", "test"))
    return f"images of {'x'.join(map(str, shape))} in {classes} classes ({counts}) from {place}"
