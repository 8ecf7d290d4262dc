"""Images in folders, one a class, as torchvision's ImageFolder has them: held in memory as uint8, or
read from the disk while training.
"""

from __future__ import annotations

import errno
import os
import platform
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.lab.keys.datasets import ImageFolder, ImageNet
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.vision.splits import about, split

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.vision.stream import ImageStream

SPLITS = ("train", "val", "test")
FULL = (errno.ENOSPC, errno.EDQUOT)
# What an archive of images may grow to: images are compressed already, but for small plain ones.
MOST_TIMES, SPARE_BYTES = 100, 10**8


@dataclass(frozen=True)
class Loaded:
    """``splits`` has uint8 images (N, 3, size, size) and int64 labels (N,) of those of train, val
    and test that are there.
    """

    splits: dict[str, tuple[Tensor, Tensor]]
    classes: list[str]


def build(config: Config, device: torch.device) -> Any:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Raises:
        ConfigError: for a folder that is missing or that is not as said.
    """
    from nmrun.lab.tasks.vision import Classification

    options = config.dataset.as_kind(ImageFolder)
    place = storage.find(
        "image_folder",
        [options.path],
        "dataset.path is a folder with a folder of images for each class",
    )
    loaded = load("image_folder", place, options.resolution)
    sizes = options.sizes()
    classes, splits = len(loaded.classes), dict(loaded.splits)
    if "test" not in splits and "val" in splits:
        splits["test"] = splits.pop("val")  # as ImageNet, whose test labels nobody has
    parts = split(splits["train"], splits.get("test"), classes, val=splits.get("val"), **sizes)
    return Classification.of(
        config,
        parts,
        classes,
        device,
        about(parts, loaded.splits["train"][0].shape[1:], classes, place),
        names=loaded.classes,
        prepared={
            "colours": "RGB",
            "resize": {"shorter_side": options.resolution, "crop": options.resolution},
        },
    )


def imagenet(config: Config, device: torch.device) -> ImageStream:
    """Build the task of ImageNet and other large folders, read from the disk while training.

    ``val`` is the test split, as labels of ImageNet's test images are nowhere, and validation
    images are taken from those for training.

    Raises:
        ConfigError: for a folder that is missing or that is not as said.
    """
    from nmrun.lab.tasks.vision.stream import ImageStream

    options = config.dataset.as_kind(ImageNet)
    how = "dataset.path is a folder with train and val, and in each a folder of images for every class"
    place = storage.find("imagenet", [options.path], how)
    names, listed = listing("imagenet", place)
    if "val" not in listed:
        raise ConfigError(
            f"dataset=imagenet: there is no {place / 'train'} with a {place / 'val'} beside it: {how}"
        )
    samples = listed["train"] + listed["val"]
    paths, labels = (
        np.array([path.encode() for path, _ in samples]),
        torch.tensor([label for _, label in samples]),
    )
    rows, trained = torch.arange(len(samples)), len(listed["train"])
    sizes = options.sizes()
    classes = len(names)
    pool, test = (rows[:trained], labels[:trained]), (rows[trained:], labels[trained:])
    parts = split(pool, test, classes, **sizes)
    said = about(parts, (3, options.resolution, options.resolution), classes, place)
    return ImageStream(config, paths, parts, classes, device, said, names)


def load(dataset: str, place: Path, size: int) -> Loaded:
    """Load all images of a folder, or of a tar archive of one.

    The folder has a folder for each of ``train``, ``val`` and ``test`` (some may be missing) with
    one for each class in it, or the classes' folders themselves, all of which is ``train`` then.
    Images are decoded once, and cached.

    Args:
        size: pixels a side, to which images of another size are centred and scaled.

    Raises:
        ConfigError: for a folder that is not so.
    """
    if place.is_file():
        arrays = storage.cached(["images", size], [place], lambda: _unpacked(dataset, place, size))
    else:
        classes, listed = listing(dataset, place)
        paths = [Path(path) for samples in listed.values() for path, _ in samples]
        arrays = storage.cached(
            ["images", size], paths, lambda: _decoded(dataset, classes, listed, size)
        )
    present = [part for part in SPLITS if f"{part}_images" in arrays]
    copied = {
        name: torch.from_numpy(np.array(array))
        for name, array in arrays.items()
        if name != "classes"
    }
    splits = {part: (copied[f"{part}_images"], copied[f"{part}_labels"]) for part in present}
    return Loaded(splits, arrays["classes"].tolist())


def listing(dataset: str, place: Path) -> tuple[list[str], dict[str, list[tuple[str, int]]]]:
    """List the images of a folder by splits and classes.

    Returns:
        The names of the classes, and paths and class numbers of the images of each split that is
        there.

    Raises:
        ConfigError: for a folder without classes, and for splits with different ones.
    """
    from torchvision.datasets import ImageFolder

    folders = {part: place / part for part in SPLITS if (place / part).is_dir()}
    if "train" not in folders:
        folders = {"train": place}
    classes: list[str] = []
    listed: dict[str, list[tuple[str, int]]] = {}
    for part, folder in folders.items():
        try:
            found = ImageFolder(str(folder))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"dataset={dataset}: {folder}: {str(error).split(' Supported')[0].rstrip('.')}"
            ) from None
        classes = classes or found.classes
        if found.classes != classes:
            odd = sorted({*found.classes} ^ {*classes})[0]
            raise ConfigError(
                f"dataset={dataset}: {place}: train and {part} have not the same classes, for instance {odd}"
            )
        listed[part] = found.samples
    return classes, listed


def _decoded(
    dataset: str, classes: list[str], listed: dict[str, list[tuple[str, int]]], size: int
) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {"classes": np.array(classes)}
    for part, samples in listed.items():
        arrays[f"{part}_images"] = _pixels(dataset, [path for path, _ in samples], size)
        arrays[f"{part}_labels"] = np.array([label for _, label in samples])
    return arrays


def _pixels(dataset: str, paths: Sequence[str], size: int) -> NDArray[np.uint8]:
    """uint8 (N, 3, size, size). Raises ConfigError for a file that cannot be decoded, and for more
    than half of the memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if len(paths) * 3 * size * size > memory / 2:
        raise ConfigError(
            f"dataset={dataset}: {len(paths)} images of dataset.resolution={size} do not fit into memory; dataset=imagenet reads as it trains"
        )
    pixels = np.empty((len(paths), 3, size, size), np.uint8)

    def fill(row: int) -> None:
        pixels[row] = np.moveaxis(decode(paths[row], size), 2, 0)

    with ThreadPoolExecutor() as threads:
        try:
            list(threads.map(fill, range(len(paths))))
        except OSError as error:
            raise ConfigError(f"dataset={dataset}: {error}") from None
    return pixels


def decode(path: str, size: int) -> NDArray[np.uint8]:
    """Decode an image file: scaled until its shorter side fits, and the middle cut out.

    Returns:
        (size, size, 3), uint8.

    Raises:
        OSError: with the file's name, for one that is damaged or none at all.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
        return np.asarray(
            image
            if image.size == (size, size)
            else ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        )
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(f"{path} is damaged, or not an image ({error})") from None


def _unpacked(dataset: str, archive: Path, size: int) -> dict[str, NDArray[Any]]:
    if not hasattr(tarfile, "data_filter"):
        raise ConfigError(
            f"dataset={dataset}: Python {platform.python_version()} has no safe way to unpack {archive}; "
            "unpack it into a folder, or take Python 3.11.4 or newer"
        )
    with tempfile.TemporaryDirectory(prefix="nmrun-") as folder:
        try:
            with tarfile.open(archive) as tar:
                most = MOST_TIMES * archive.stat().st_size + SPARE_BYTES
                tar.extractall(folder, members=_up_to(most, tar), filter="data")
            inside = Path(folder)
            while len(entries := list(inside.iterdir())) == 1 and entries[0].is_dir():
                inside = entries[0]
            return _decoded(dataset, *listing(dataset, inside), size)
        except (tarfile.TarError, OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise ConfigError(
                    f"dataset={dataset}: {archive} is unpacked in {tempfile.gettempdir()}, where no "
                    "space is left: free some, or set TMPDIR to another folder"
                ) from None
            raise ConfigError(
                f"dataset={dataset}: {archive} is damaged, or not a tar archive ({str(error).splitlines()[0]})"
            ) from None


def _up_to(most: int, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members, until they take more than so many bytes."""
    total = 0
    for member in tar:
        total += tarfile.BLOCKSIZE + member.size
        if total > most:
            raise tarfile.TarError(f"it holds more than {most:,} bytes, which no images do")
        yield member
