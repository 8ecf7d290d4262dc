"""ImageNet, and other large image folders: read from the disk while training (torchvision's
ImageFolder, with train and val).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nmrun.errors import ConfigError
from nmrun.lab.data import image_folder, local
from nmrun.lab.data.splits import about, split
from nmrun.lab.keys.datasets import ImageNet
from nmrun.lab.tasks.image_stream import ImageStream

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config


def build(config: Config, device: torch.device) -> ImageStream:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    ``val`` is the test split, as labels of ImageNet's test images are nowhere, and validation
    images are taken from those for training.

    Raises:
        ConfigError: for a folder that is missing or that is not as said.
    """
    options = config.dataset.as_kind(ImageNet)
    how = "dataset.path is a folder with train and val, and in each a folder of images for every class"
    place = local.find("imagenet", [options.path], how)
    names, listed = image_folder.listing("imagenet", place)
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
