"""CIFAR-10, CIFAR-100 and Fashion-MNIST, from torchvision's files or, for CIFAR-10, from folders of images."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nmrun.data import image_folder, local
from nmrun.errors import ConfigError
from nmrun.settings.datasets import Images
from nmrun.tasks.vision import Classification

if TYPE_CHECKING:
    from nmrun.settings.config import Config

Labelled = tuple[Tensor, Tensor]

FILES = {  # torchvision's class, the folder of its files, and images under other names
    "cifar10": ("CIFAR10", "cifar-10-batches-py", ("cifar10/cifar10-jpeg", "cifar10/cifar10-jpeg.tar.xz")),
    "cifar100": ("CIFAR100", "cifar-100-python", ()),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST", ()),
}
SECONDS_TO_ANSWER = 20.0  # of a server, before the download is given up


def build(config: Config, device: torch.device) -> Classification:
    """The task of the config's ``dataset`` group. Raises ConfigError where the data are neither here nor to be downloaded."""
    options = config.dataset.as_kind(Images)
    pool, test, place = read(options.name)
    classes = int(pool[1].max()) + 1
    splits = split(pool, test, classes, **options.sizes())
    return Classification.of(config, splits, classes, device, about(splits, pool[0].shape[1:], classes, place))


def read(name: str) -> tuple[Labelled, Labelled, Path]:
    """Training and test images of a data set in ``FILES``, uint8 (N, C, H, W) with int64 labels (N,), and where they lie.

    Looked for in ``NMRUN_DATA`` itself and in its folder of that name, and downloaded to the latter by torchvision.
    """
    _, folder, others = FILES[name]
    names = [f"{name}/{folder}", folder, *others]
    try:
        place = local.find(name, names, "it is downloaded")
    except ConfigError as missing:
        place = _download(name, missing)
    if any(place.match(other) for other in others):
        loaded = image_folder.load(name, place, size=32)
        if "test" not in loaded.splits:
            raise ConfigError(f"dataset={name}: {place} has no folders train and test")
        return loaded.splits["train"], loaded.splits["test"], place
    try:
        train, test = (_of_torchvision(name, place.parent, train) for train in (True, False))
    except (RuntimeError, ValueError, AssertionError, EOFError, OSError) as error:
        problem = str(error).split(". ")[0] or "damaged"
        raise ConfigError(f"dataset={name}: {place}: {problem}; remove it, and it is downloaded anew") from None
    return train, test, place


def _of_torchvision(name: str, root: Path, train: bool, download: bool = False) -> Labelled:
    from torchvision import datasets

    source = getattr(datasets, FILES[name][0])(root, train=train, download=download)
    images = torch.as_tensor(source.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images.contiguous(), torch.as_tensor(source.targets, dtype=torch.int64)


def _download(name: str, missing: ConfigError) -> Path:
    """Download below ``NMRUN_DATA``; nothing half-done is left there."""
    root, place = local.data_folder(), local.data_folder() / name / FILES[name][1]
    waits = socket.getdefaulttimeout()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as passing:
            socket.setdefaulttimeout(SECONDS_TO_ANSWER)
            _of_torchvision(name, Path(passing), train=True, download=True)
            place.parent.mkdir(exist_ok=True)
            if not place.exists():  # another process may have been faster
                os.rename(Path(passing) / place.name, place)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{missing.problems[0].partition(': it is downloaded')[0]}, and its download failed ({error})"
        ) from None
    finally:
        socket.setdefaulttimeout(waits)
    return place


def split(
    pool: Labelled,
    test: Labelled | None,
    classes: int,
    split_seed: int,
    train_size: int | None,
    val_size: int | None,
    test_size: int | None,
    val: Labelled | None = None,
) -> dict[str, Labelled]:
    """``{"train" | "val" | "test": (images, labels)}``, by ``split_seed`` alone.

    Sizes are numbers of images, with the same number of every class, or one more of the first ones. By default ``val`` is a
    tenth of each class of ``pool``, ``test`` all of ``test``, or another tenth where there is none, and ``train`` all the rest;
    a smaller training set is part of a larger one. Raises ConfigError for a class that has too few images.
    """
    splits, rest = {}, pool
    for name, given, size in (("test", test, test_size), ("val", val, val_size), ("train", None, train_size)):
        source = rest if given is None else given
        counts = torch.bincount(source[1], minlength=classes)
        if size is not None:
            quotas = torch.tensor([size // classes + (number < size % classes) for number in range(classes)])
            for number in (quotas > counts).nonzero()[:1, 0].tolist():
                raise ConfigError(
                    f"dataset.{name}_size={size}: {int(quotas[number])} images of class {number}, of which there are {counts[number]}"
                )
        else:
            quotas = counts if given is not None or name == "train" else (counts / 10).round().long()
        chosen, left = _take(source[1], quotas, split_seed)
        splits[name] = source[0][chosen], source[1][chosen]
        if given is None:
            rest = source[0][left], source[1][left]
    empty = [name for name, (images, _) in splits.items() if not len(images)]
    if empty:
        raise ConfigError(f"dataset.{empty[0]}_size: no image is left for it of the {len(pool[1])} that there are")
    return splits


def _take(labels: Tensor, quotas: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows with ``quotas`` of each class, in random order, and all others."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = labels[order].argsort(stable=True)  # rows of ``order``, class by class
    counts = torch.bincount(labels, minlength=len(quotas))
    rank = torch.arange(len(labels)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    taken = torch.zeros(len(labels), dtype=torch.bool)
    taken[by_class] = rank < torch.repeat_interleave(quotas, counts)
    return order[taken], order[~taken]


def about(splits: dict[str, Labelled], shape: Sequence[int], classes: int, place: Path) -> str:
    """The line of the plan on the data."""
    counts = ", ".join(f"{len(splits[name][1]):,} {name}" for name in ("train", "val", "test"))
    return f"images of {'x'.join(map(str, shape))} in {classes} classes ({counts}) from {place}"
