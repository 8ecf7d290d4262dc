"""scikit-learn's digits: 1,797 real grey images of 8x8 pixels in 10 classes, shipped with the
library (no download).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.lab.keys.datasets import Digits
from nmrun.lab.tasks.vision import Classification

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

CLASSES = 10
Splits = dict[str, tuple[Tensor, Tensor]]


@cache
def load(split_seed: int = 0, val_fraction: float = 0.15, test_fraction: float = 0.2) -> Splits:
    """Load scikit-learn's digits, split by ``split_seed`` alone.

    Every class is split alike, so all runs of a comparison see the same test images. Pixels are
    normalised by mean and standard deviation of the training images.

    Returns:
        ``{"train" | "val" | "test": (images, labels)}``: float32 (N, 1, 8, 8) and int64 (N,).
    """
    splits = _pixels(split_seed, val_fraction, test_fraction)
    mean, std = _spread(splits["train"][0])
    return {name: ((images - mean) / std, labels) for name, (images, labels) in splits.items()}


def _spread(train: Tensor) -> tuple[Tensor, Tensor]:
    return train.mean(), train.std()


@cache
def _pixels(split_seed: int, val_fraction: float, test_fraction: float) -> Splits:
    """The splits of :func:`load`, with pixels from 0 to 16."""
    images, labels = _read()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    members: dict[str, list[Tensor]] = {"test": [], "val": [], "train": []}
    for digit in range(CLASSES):
        of_class = order[labels[order] == digit]
        test = round(test_fraction * len(of_class))
        val = round(val_fraction * len(of_class))
        if test + val > len(of_class):
            raise ConfigError(
                f"dataset.val_fraction={val_fraction} and dataset.test_fraction={test_fraction} "
                "are more than all images together"
            )
        parts = of_class.split([test, val, len(of_class) - test - val])
        for part, chosen in zip(members.values(), parts, strict=True):
            part.append(chosen)
    chosen = {name: torch.cat(parts) for name, parts in members.items()}
    if empty := [name for name, rows in chosen.items() if not len(rows)]:
        raise ConfigError(
            f"dataset.val_fraction={val_fraction} and dataset.test_fraction={test_fraction} "
            f"leave no image for {empty[0]}"
        )
    return {name: (images[rows], labels[rows]) for name, rows in chosen.items()}


def build(config: Config, device: torch.device) -> Classification:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    options = config.dataset.as_kind(Digits)
    division = options.split_seed, options.val_fraction, options.test_fraction
    mean, std = map(float, _spread(_pixels(*division)["train"][0]))
    return Classification.of(
        config,
        load(*division),
        CLASSES,
        device,
        names=[str(digit) for digit in range(CLASSES)],
        prepared={"colours": "grey", "range": [0, 16], "mean": [mean], "std": [std]},
    )


def _read() -> tuple[Tensor, Tensor]:
    """All images (0 to 16) and labels, as ``sklearn.datasets.load_digits`` gives them, without the
    seconds its import takes.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "the digits data set comes with scikit-learn, which is not installed"
        )
    table = torch.from_numpy(
        np.loadtxt(
            Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","
        )
    )
    return table[:, :-1].float().view(-1, 1, 8, 8), table[:, -1].long()
