"""scikit-learn's digits: 1,797 real grey images of 8x8 pixels in 10 classes, shipped with the library (no download)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CLASSES = 10
Splits = dict[str, tuple[Tensor, Tensor]]


@cache
def load(split_seed: int = 0, val_fraction: float = 0.15, test_fraction: float = 0.2) -> Splits:
    """``{"train" | "val" | "test": (images, labels)}``: float32 (N, 1, 8, 8) and int64 (N,).

    Split by class with ``split_seed`` alone, so all runs of a comparison see the same test images; the fractions are of all images.
    Pixels are normalised by mean and standard deviation of the training images.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    total = len(classes)
    rest, test = train_test_split(range(total), test_size=round(test_fraction * total), random_state=split_seed, stratify=classes)
    train, val = train_test_split(rest, test_size=round(val_fraction * total), random_state=split_seed, stratify=classes[rest])
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(classes, dtype=torch.int64)
    images = (images - images[train].mean()) / images[train].std()
    return {name: (images[chosen], labels[chosen]) for name, chosen in (("train", train), ("val", val), ("test", test))}
