"""CIFAR-10, CIFAR-100 and Fashion-MNIST, from torchvision's files or, for CIFAR-10, from folders of
images.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nmrun.errors import ConfigError
from nmrun.lab.keys.datasets import Images
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.vision import Classification, folders
from nmrun.lab.tasks.vision.splits import Labelled, about, split

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

FILES = {  # torchvision's class, the folder of its files, and images under other names
    "cifar10": (
        "CIFAR10",
        "cifar-10-batches-py",
        ("cifar10/cifar10-jpeg", "cifar10/cifar10-jpeg.tar.xz"),
    ),
    "cifar100": ("CIFAR100", "cifar-100-python", ()),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST", ()),
}
SECONDS_TO_ANSWER = 20.0  # of a server, before the download is given up


def build(config: Config, device: torch.device) -> Classification:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Raises:
        ConfigError: where the data are neither here nor to be downloaded.
    """
    options = config.dataset.as_kind(Images)
    pool, test, names, place = read(options.name)
    shape, classes = pool[0].shape[1:], len(names)
    splits = split(pool, test, classes, **options.sizes())
    return Classification.of(
        config,
        splits,
        classes,
        device,
        about(splits, shape, classes, place),
        names=names,
        prepared={"colours": "RGB" if shape[0] == 3 else "grey"},
    )


def read(name: str) -> tuple[Labelled, Labelled, list[str], Path]:
    """Read a data set in ``FILES``.

    It is looked for in ``NMRUN_DATA`` itself and in its folder of that name, and downloaded to the
    latter by torchvision.

    Returns:
        Training and test images, uint8 (N, C, H, W) with int64 labels (N,), the names of the
        classes, and where they lie.

    Raises:
        ConfigError: where the data are neither here nor to be downloaded, or damaged.
    """
    _, folder, others = FILES[name]
    names = [f"{name}/{folder}", folder, *others]
    try:
        place = storage.find(name, names, "it is downloaded")
    except ConfigError as missing:
        place = _download(name, missing)
    if any(place.match(other) for other in others):
        loaded = folders.load(name, place, size=32)
        if "test" not in loaded.splits:
            raise ConfigError(f"dataset={name}: {place} has no folders train and test")
        return loaded.splits["train"], loaded.splits["test"], loaded.classes, place
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


def _download(name: str, missing: ConfigError) -> Path:
    """Download below ``NMRUN_DATA``; nothing half-done is left there."""
    root, place = storage.data_folder(), storage.data_folder() / name / FILES[name][1]
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
