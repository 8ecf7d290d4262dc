"""A folder of images of three classes, which differ in their mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COUNTS = {"train": 12, "val": 4}  # of each class


def picture(split: str, label: int, number: int, shape: tuple[int, int] = (8, 8)) -> np.ndarray:
    """Random pixels whose mean depends on the class."""
    random = np.random.default_rng([len(split), label, number])
    return (random.integers(0, 100, (*shape, 3)) + 60 * label).astype(np.uint8)


def make_folder(
    place: Path, shape: tuple[int, int] = (8, 8), splits: dict[str, int] = COUNTS
) -> Path:
    for split, count in splits.items():
        for label, name in enumerate(("ant", "bee", "cat")):
            folder = place / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(picture(split, label, number, shape))
                image.save(folder / f"{number:02}.png")
    return place
